"""Show progress: on a terminal by bars and tables, elsewhere by occasional lines."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fl_privacy import progress
from fl_privacy.progress import Remaining, ShareLines, Stage, at_work, clock, describe, listening, share_done, time_left
from fl_privacy.runs.folder.ongoing import PROGRESS, Ongoing, Teller, read_ongoing
from fl_privacy.runs.run_location import LineMonitor, Monitor

if TYPE_CHECKING:
    from fl_privacy.federation import Evaluation, RoundReport


class Lines:
    """Printer of progress lines, some seconds apart; during a long step it repeats the line. ``silent`` prints none."""

    def __init__(self, say: Callable[[str], None], *, silent: bool) -> None:
        self._say, self._pause, self._silent = say, progress.BETWEEN_LINES, silent
        self._text, self._since = "", time.monotonic()
        self._said = self._since
        self._over, self._lock = threading.Event(), threading.Lock()
        self._beat = threading.Thread(target=self._repeat, daemon=True)

    def tell(self, text: str) -> None:
        with self._lock:
            now = time.monotonic()
            self._text, self._since = text, now
            if text and not self._silent and now - self._said >= self._pause:
                self._said = now
                self._say(text)

    def _repeat(self) -> None:
        while not self._over.wait(max(self._pause / 10, 0.1)):
            with self._lock:
                now = time.monotonic()
                if self._text and now - self._said >= self._pause:
                    self._said = now
                    self._say(f"{self._text} ({clock(now - self._since)} at this step)")

    def __enter__(self) -> Lines:
        if not self._silent:
            self._beat.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._beat.is_alive():
            self._beat.join()


SHOWN_ROUNDS = 8


def progress_bar(console: Console, *columns: str) -> Progress:
    """Make a progress bar after the texts ``columns`` (Rich markup); it is hidden if there is no terminal."""
    shown = (*map(TextColumn, columns), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*shown, console=console, disable=not console.is_terminal)


class RichMonitor(LineMonitor):
    """Monitor that shows a run on ``console``: live on a terminal, else by an occasional line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._rounds: deque[tuple[RoundReport, Evaluation | None, float | None]] = deque(maxlen=SHOWN_ROUNDS)
        self._total = self._done = 0
        self._show: Callable[[], None] = lambda: None

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    @contextmanager
    def training(self, rounds: int) -> Iterator[None]:
        self._rounds.clear()
        self._total, self._done, bar = rounds, 0, progress_bar(self.console, "Training")
        task, left, doing = bar.add_task("", total=rounds), Remaining(), Text("", style="dim")
        shown = Live(console=self.console, refresh_per_second=4, transient=not self.console.is_terminal)
        with self._lines() as lines, shown as live:

            def show() -> None:
                bar.update(task, completed=self._done)
                live.update(Group(self._table(), bar, doing))

            def listen(stages: tuple[Stage, ...]) -> None:
                number = f"Round {min(self._done + 1, rounds)}/{rounds}"
                text = f"{number}: {describe(stages)}{_left(left, stages, number)}" if stages else ""
                doing.plain = text
                lines.tell(text)

            self._show = show
            show()
            with listening(listen):
                yield

    def round_done(self, report: RoundReport, evaluation: Evaluation | None, epsilon: float | None) -> None:
        self._rounds.append((report, evaluation, epsilon))
        self._done = report.round
        if self.console.is_terminal:
            self._show()
        elif report.round % max(1, self._total // 10) == 0 or report.round == 1:
            shown = f", accuracy {evaluation.accuracy:.1%}" if evaluation else ""
            shown += f", epsilon {epsilon:.3g}" if epsilon is not None else ""
            self.say(f"Round {report.round}/{self._total}: train loss {loss_in_words(report, epsilon)}{shown}")

    @contextmanager
    def working(self, title: str) -> Iterator[None]:
        left = Remaining()
        with (
            self._lines() as lines,
            self.console.status(title) if self.console.is_terminal else nullcontext() as status,
        ):

            def listen(stages: tuple[Stage, ...]) -> None:
                text = f"{title}: {describe(stages)}{_left(left, stages)}" if stages else ""
                lines.tell(text)
                if status is not None:
                    status.update(text or title)

            with listening(listen):
                yield

    @contextmanager
    def attacking(self, what: str) -> Iterator[progress.Progress]:
        if not self.console.is_terminal:
            with super().attacking(what) as tell:
                yield tell
            return
        with progress_bar(self.console, f"Attacking {what}", "{task.description}") as bar:
            task = bar.add_task("", total=None)
            with listening(lambda stages: bar.update(task, description=at_work(stages)) if stages else None):
                yield lambda done, total: bar.update(task, completed=done, total=total)

    @contextmanager
    def counting(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        if not self.console.is_terminal:
            tell = ShareLines(self.say, title)
            yield lambda done: tell(done, total)
            return
        with progress_bar(self.console, title) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)

    def _lines(self) -> Lines:
        return Lines(self.say, silent=self.console.is_terminal)

    def _table(self) -> Table:
        table = Table("round", "clients", "train loss", "test accuracy", "seconds", "MB uploaded", box=None)
        if any(epsilon is not None for _, _, epsilon in self._rounds):
            table.add_column("epsilon")
        for report, evaluation, epsilon in self._rounds:
            table.add_row(
                str(report.round),
                str(len(report.clients)) + (f" (-{len(report.excluded)})" if report.excluded else ""),
                loss_in_words(report, epsilon),
                f"{evaluation.accuracy:.2%}" if evaluation else "",
                f"{report.seconds:.2f}",
                f"{report.upload_bytes / 1e6:.2f}",
                *([f"{epsilon:.3g}"] if epsilon is not None else []),
            )
        return table


def loss_in_words(report: RoundReport, epsilon: float | None) -> str:
    """Format the mean training loss, or return ``withheld`` if it is NaN and there is an ``epsilon``."""
    return "withheld" if math.isnan(report.train_loss) and epsilon is not None else f"{report.train_loss:.3f}"


def _left(left: Remaining, stages: tuple[Stage, ...], *within: str) -> str:
    return time_left(left((*within, stages[0].what), share_done(stages)))


LOOK_EVERY = 1.0  # seconds
_WHOLE = 10_000


class WrittenMonitor(Monitor):
    """Monitor that writes a training's progress into ``folder``; attacks write their own progress."""

    def __init__(self, folder: Path) -> None:
        self._teller, self._done = Teller(folder), 0

    @contextmanager
    def training(self, rounds: int) -> Iterator[None]:
        self._done, what = 0, "Training"
        tell = self._teller.telling(lambda: what, progress.no_progress)

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
    """Progress bar of parallel jobs; if there is no terminal, an occasional line."""

    def __init__(self, title: str, folders: Sequence[Path], console: Console) -> None:
        self._console, self._title = console, title
        self._bar = progress_bar(console, title)
        self._task = self._bar.add_task("", total=len(folders))
        self._doing = Text("", style="dim", no_wrap=True, overflow="ellipsis")
        self._left, self._total = list(folders), len(folders)
        self._since, self._over, self._remaining = time.time(), threading.Event(), Remaining()
        plain = partial(console.print, highlight=False, markup=False)
        self._lines = Lines(plain, silent=console.is_terminal)
        self._remaining(title, 0)

    def ended(self, folder: Path) -> str:
        self._left.remove(folder)
        return f"{self._total - len(self._left)}/{self._total} finished: {folder.name}{self._look()}"

    def _look(self) -> str:
        found = list[tuple[Path, Ongoing]]()
        for folder in list(self._left):
            with suppress(OSError):
                recent = (folder / PROGRESS).stat().st_mtime >= self._since  # else it is an earlier process's
                if recent and (state := read_ongoing(folder)) is not None:
                    found.append((folder, state))
        number = self._total - len(self._left)
        done = number + sum(state.share for _, state in found)
        self._bar.update(self._task, completed=done)
        self._doing.plain = "; ".join(f"{folder.name}: {state.what}" for folder, state in found)
        # Of all jobs together, but no less than the longest needs, which is often the last.
        seconds = [self._remaining(self._title, done / max(self._total, 1))]
        seconds += [state.left for _, state in found if state.share >= progress.SHOWN_FROM]
        left = time_left(max(filter(None, seconds), default=None) if self._left else None)
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
