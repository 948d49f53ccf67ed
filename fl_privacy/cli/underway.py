"""Progress of jobs in processes of their own, written into their folders and shown by the parent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fl_privacy.attacks import no_progress
from fl_privacy.cli.console import SECONDS_BETWEEN_LINES, Lines, progress_bar
from fl_privacy.federation import Evaluation, RoundReport
from fl_privacy.progress import Remaining, Stage, describe, listening, share_done, time_left
from fl_privacy.runs.destination import Monitor
from fl_privacy.runs.folder.ongoing import PROGRESS, Ongoing, Teller, read_ongoing

LOOK_EVERY = 1.0
"""Seconds."""

_WHOLE = 10_000


class WrittenMonitor(Monitor):
    """Write a training's progress into the ``folder`` of its job; attacks do so themselves."""

    def __init__(self, folder: Path) -> None:
        self._teller, self._done = Teller(folder), 0

    @contextmanager
    def training(self, rounds: int) -> Iterator[None]:
        self._done, what = 0, "Training"
        tell = self._teller.telling(lambda: what, no_progress)

        def listen(stages: tuple[Stage, ...]) -> None:
            nonlocal what
            if stages:
                what = f"Training, round {min(self._done + 1, rounds)}/{rounds}, {describe(stages)}"
                tell(round(_WHOLE * (self._done + share_done(stages))), _WHOLE * rounds)

        with listening(listen):
            yield

    def round_done(self, report: RoundReport, evaluation: Evaluation | None, epsilon: float | None) -> None:
        self._done = report.round


class Underway:
    """A bar over jobs with their progress; without a terminal an occasional line."""

    def __init__(self, title: str, folders: Sequence[Path], console: Console) -> None:
        self._console, self._title = console, title
        self._bar = progress_bar(console, title)
        self._task = self._bar.add_task("", total=len(folders))
        self._doing = Text("", style="dim", no_wrap=True, overflow="ellipsis")
        self._left, self._total = list(folders), len(folders)
        self._since, self._over, self._remaining = time.time(), threading.Event(), Remaining()
        plain = partial(console.print, highlight=False, markup=False)
        self._lines = Lines(plain, SECONDS_BETWEEN_LINES, silent=console.is_terminal)
        self._remaining(title, 0)

    def ended(self, folder: Path) -> str:
        """Remove the job of ``folder``; return ``3/18 finished`` and the time left."""
        self._left.remove(folder)
        return f"{self._total - len(self._left)}/{self._total} finished: {folder.name}{self._look()}"

    def _look(self) -> str:
        found = list[tuple[Path, Ongoing]]()
        for folder in list(self._left):
            with suppress(OSError):
                recent = (folder / PROGRESS).stat().st_mtime >= self._since  # else it is an earlier process's
                if recent and (told := read_ongoing(folder)) is not None:
                    found.append((folder, told))
        number = self._total - len(self._left)
        done = number + sum(told.share for _, told in found)
        self._bar.update(self._task, completed=done)
        self._doing.plain = "; ".join(f"{folder.name}: {told.what}" for folder, told in found)
        left = time_left(self._remaining(self._title, done / max(self._total, 1)) if self._left else None)
        if found:
            self._lines.tell(f"{self._title}, {number}/{self._total} finished; {self._doing.plain}{left}")
        return left

    @contextmanager
    def shown(self) -> Iterator[None]:
        def watch() -> None:
            while not self._over.wait(LOOK_EVERY):
                self._look()

        terminal = self._console.is_terminal
        thread = threading.Thread(target=watch, daemon=True)
        group = Group(self._bar, self._doing)
        with self._lines, Live(group, console=self._console, refresh_per_second=4, transient=not terminal):
            thread.start()
            try:
                yield
            finally:
                self._over.set()
                thread.join()
                self._doing.plain = ""
