"""Define a run's folder, and its interfaces to backends and monitors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from fl_privacy.errors import UserError, say
from fl_privacy.progress import Progress, ShareLines, Stage, at_work, listening, no_progress
from fl_privacy.report import write_report
from fl_privacy.runs.config import RunSettings, to_yaml
from fl_privacy.runs.folder import RunFolder, folder_name, is_finished, read_environment
from fl_privacy.runs.folder.identity import code_hash

if TYPE_CHECKING:
    from fl_privacy.federation import Audit, ClientSource, Evaluation, Round, RoundReport, Server
    from fl_privacy.federation.interception import Interceptor


class Backend(Protocol):
    """Way to run the rounds of a training, such as in this process or by Flower; results do not depend on it."""

    def __call__(
        self, server: Server, source: ClientSource, *, rounds: int, audit: Audit, interceptor: Interceptor
    ) -> Generator[Round, None, object]: ...


def plain_loop(
    server: Server, source: ClientSource, *, rounds: int, audit: Audit, interceptor: Interceptor
) -> Generator[Round, None, object]:
    """Train in this process, one client after the other; yield each round."""
    from fl_privacy.federation import plain_rounds  # noqa: PLC0415  (PyTorch)

    return plain_rounds(server, source(), rounds=rounds, audit=audit, interceptor=interceptor)


class Monitor:
    """Receives a run's progress; this base class ignores it."""

    def say(self, text: str) -> None:
        """Announce the next step."""

    def training(self, rounds: int) -> AbstractContextManager[None]:
        return nullcontext()

    def round_done(self, report: RoundReport, evaluation: Evaluation | None, epsilon: float | None) -> None:
        """Report a finished round, with ``evaluation`` and ``epsilon`` if known."""

    def counting(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda done: None)

    def working(self, title: str) -> AbstractContextManager[None]:
        return nullcontext()

    def attacking(self, what: str) -> AbstractContextManager[Progress]:
        return nullcontext(no_progress)


class LineMonitor(Monitor):
    """Prints an attack's progress from time to time, in a user's server or notebook."""

    def say(self, text: str) -> None:
        say(text)

    @contextmanager
    def attacking(self, what: str) -> Iterator[Progress]:
        working = ""

        def listen(stages: tuple[Stage, ...]) -> None:
            nonlocal working
            working = f", {at_work(stages)}" if stages else working

        with listening(listen):
            yield ShareLines(self.say, f"Attacking {what}", lambda: working)


Command = Literal["run", "attack"]


@dataclass(frozen=True, eq=False)
class RunLocation:
    """Folder of a run, named after the chosen options, such as model and attack, and the hash of all settings."""

    command: Command
    config: RunSettings

    @cached_property
    def identified(self) -> dict[str, object]:
        return {"command": self.command, **self.config.plain()}

    @property
    def path(self) -> Path:
        return Path(self.config.out) / folder_name(self._label, self.identified)

    def finished_before(self, monitor: Monitor) -> Path | None:
        if self.config.overwrite or not is_finished(self.path):
            return None
        same_code = read_environment(self.path).get("code") in (None, code_hash())
        whose = "" if same_code else ", by another version of the code"
        monitor.say(f"Finished already{whose}; overwrite=true runs it again.")
        self.write_page()
        return self.path

    def write_page(self) -> None:
        if self.config.page:
            write_report([self.path])

    @contextmanager
    def recording(self, monitor: Monitor) -> Iterator[RunFolder]:
        """Open the run's folder, yield it to record the run, and write its page at the end."""
        config = self.config
        try:
            opened = RunFolder.open_or_create(
                Path(config.out),
                label=self._label,
                config=self.identified,
                config_text=f"command: {self.command}\n{to_yaml(config)}",
                undefended=config.choices["defense"] == "none" and config.captured is None,
                overwrite=config.overwrite,
            )
        except OSError as error:
            raise UserError(
                f"out is expected to be a folder that can be written, but {config.out} can't ({error.strerror});"
                " set out=FOLDER."
            ) from error
        with opened as folder:
            if folder.finished:
                monitor.say("Another process has just finished it.")
            yield folder
        self.write_page()

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
                f"name and options are expected to name a folder, but got {label!r}; omit slashes and a first dot."
            )
        return label
