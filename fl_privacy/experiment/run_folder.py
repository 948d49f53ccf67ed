"""Where a run's results go."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from fl_privacy.config import RunSettings, to_yaml
from fl_privacy.errors import UserError
from fl_privacy.experiment.build import resolve_device
from fl_privacy.experiment.protocols import Monitor
from fl_privacy.report import write_report
from fl_privacy.results import RunFolder, folder_name, is_finished

Command = Literal["run", "attack"]


@dataclass(frozen=True, eq=False)
class Destination:
    """Of what ``command`` makes of ``config``: a folder named after its choices, told apart by the hash of it all."""

    command: Command
    config: RunSettings

    @cached_property
    def identified(self) -> dict[str, object]:
        """The settings as plain values, with the command that they were given to."""
        return {"command": self.command, **self.config.plain()}

    @property
    def path(self) -> Path:
        """Of the folder, whether or not it is there."""
        return Path(self.config.out) / folder_name(self._label, self.identified)

    def finished_before(self, monitor: Monitor) -> Path | None:
        """The folder with a new page, if there is nothing left to do; decided before anything is built.

        Raises:
            UserError: a setting that a finished run does not need any more is wrong.
        """
        resolve_device(self.config.device)
        if self.config.overwrite or not is_finished(self.path):
            return None
        monitor.say("Finished already; overwrite=true runs it again.")
        self.write_page()
        return self.path

    def write_page(self) -> None:
        """The page of what the folder holds, unless the settings do without."""
        if self.config.page:
            write_report([self.path])

    def open(self) -> RunFolder:
        """The folder, to record in.

        Raises:
            UserError: it can't be made.
        """
        config = self.config
        try:
            return RunFolder.open_or_create(
                Path(config.out),
                label=self._label,
                config=self.identified,
                config_text=f"command: {self.command}\n{to_yaml(config)}",
                undefended=config.choices.defense == "none" and config.captured is None,
                overwrite=config.overwrite,
            )
        except OSError as error:
            raise UserError(
                f"out is expected to be a folder that can be written, but {config.out} can't ({error.strerror});"
                " set out=FOLDER."
            ) from error

    @property
    def _label(self) -> str:
        config = self.config
        chosen = [config.called(part) for part in ("data", "model", "federation", "defense", "attack")]
        front = [str(config.name)] if config.name is not None else [] if self.command == "run" else [self.command]
        if (server := config.choices.get("server", "honest")) != "honest":
            chosen.insert(-1, server)
        if (inference := config.choices.get("inference", "none")) != "none":
            chosen.append(inference)
        label = "-".join([*front, *chosen])
        if "/" in label or "\\" in label or not label.isprintable() or label.startswith("."):
            raise UserError(
                f"name is expected to be part of a folder's name, but got {config.name!r}; set out=FOLDER too."
            )
        return label
