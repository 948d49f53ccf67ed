"""Where a run's results go."""

from pathlib import Path
from typing import Literal

from fl_privacy.config import RunSettings, to_yaml
from fl_privacy.config.keys import called
from fl_privacy.errors import UserError
from fl_privacy.experiment.protocols import Monitor
from fl_privacy.report import write_report
from fl_privacy.results import RunFolder, folder_name, is_finished

Command = Literal["run", "attack"]


def identified(config: RunSettings, command: Command) -> dict[str, object]:
    """``config`` as plain values, with the command that it was given to."""
    return {"command": command, **config.plain()}


def folder_of(config: RunSettings, command: Command) -> Path:
    """Where ``open_folder`` records ``config``."""
    return Path(config.out) / folder_name(_label(config, command), identified(config, command))


def finished_before(config: RunSettings, command: Command, monitor: Monitor) -> Path | None:
    """The folder of ``config`` with a new page, if there is nothing left to do; decided before anything is built."""
    folder = folder_of(config, command)
    if config.overwrite or not is_finished(folder):
        return None
    monitor.say("Finished already; overwrite=true runs it again.")
    write_page(config, folder)
    return folder


def write_page(config: RunSettings, folder: Path) -> None:
    """The page of the run in ``folder``, unless ``config`` does without."""
    if config.page:
        write_report([folder])


def open_folder(config: RunSettings, command: Command) -> RunFolder:
    """The folder of ``config``: named after its choices, told apart by the hash of all of it.

    Raises:
        UserError: it can't be made.
    """
    try:
        return RunFolder.open_or_create(
            Path(config.out),
            label=_label(config, command),
            config=identified(config, command),
            config_text=f"command: {command}\n{to_yaml(config)}",
            undefended=config.choices.defense == "none" and command == "run",
            overwrite=config.overwrite,
        )
    except OSError as error:
        raise UserError(
            f"out is expected to be a folder that can be written, but {config.out} can't ({error.strerror});"
            " set out=FOLDER."
        ) from error


def name_of(config: RunSettings, part: str) -> str:
    """Of the option that ``config`` chooses for ``part``, or of what a user wrote in its place."""
    return called(config.choices[part], getattr(config, part))


def _label(config: RunSettings, command: Command) -> str:
    parts = ("data", "model", "federation", "defense", "attack")
    chosen = [name_of(config, part) for part in parts]
    front = [str(config.name)] if config.name is not None else [] if command == "run" else [command]
    if (server := config.choices.get("server", "honest")) != "honest":
        chosen.insert(-1, server)
    if (inference := config.choices.get("inference", "none")) != "none":
        chosen.append(inference)
    label = "-".join([*front, *chosen])
    if "/" in label:
        raise UserError(f"name is expected to be part of a folder's name, but got {config.name!r}; set out=FOLDER too.")
    return label
