"""Progress of long loops, and limits of time: ``counted("condensing images", range(200))`` reports to a listener."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Progress = Callable[[int, int], None]  # (work done, work in all), in any unit; called often and cheap


def no_progress(done: int, total: int) -> None:
    """Progress callback that does nothing."""


@dataclass(frozen=True)
class Stage:
    """Work in progress: ``done`` of ``total`` steps; ``what``: name of the work."""

    what: str
    done: int
    total: int


Listener = Callable[[tuple[Stage, ...]], None]
"""Callback with all stages in progress, the outermost first; an empty tuple at the end."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_stages: ContextVar[tuple[Stage, ...]] = ContextVar("stages", default=())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report progress within the context to ``listener``, in place of any outer listener."""
    before, around = _listener.set(listener), _stages.set(())
    try:
        yield
    finally:
        _listener.reset(before)
        _stages.reset(around)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yield ``items``, and report before each how many are done; ``what`` names the work (``condensing images``)."""
    outer, total = _stages.get(), len(items)
    try:
        for done, item in enumerate(items):
            _tell((*outer, Stage(what, done, total)))
            yield item
    finally:
        _stages.set(outer)
        if not outer:
            _tell(())


def share_done(stages: Sequence[Stage]) -> float:
    """Return the done share in [0, 1] of the outermost stage; an inner stage is a fraction of its current step."""
    share = 0.0
    for stage in reversed(stages):
        share = min((stage.done + share) / max(stage.total, 1), 1.0)
    return share


def describe(stages: tuple[Stage, ...]) -> str:
    """Describe the stages in progress, such as ``client 2/3, condensing images 57/200``."""
    return ", ".join(f"{s.what} {min(s.done + 1, s.total)}/{s.total}" for s in stages)


def at_work(stages: tuple[Stage, ...]) -> str:
    """Describe the stages in progress, with numbers only for several steps: ``cocktail party, victim 3/8``."""
    return ", ".join(describe((stage,)) if stage.total > 1 else stage.what for stage in stages)


SHOWN_FROM = 0.05
"""Smallest share done from which the time left is estimated; earlier estimates would extrapolate startup time."""


class Remaining:
    """Estimator of the time left for consecutive pieces of work."""

    def __init__(self) -> None:
        self._work: object = None
        self._started = time.monotonic()
        self._from = 0.0

    def __call__(self, work: object, share: float) -> float | None:
        """Return the seconds left of ``work``, of which ``share`` in [0, 1] is done; ``None`` while unknown."""
        now = time.monotonic()
        if work != self._work or share < self._from:
            self._work, self._started, self._from = work, now, share
        done = share - self._from
        return (now - self._started) * (1 - share) / done if done >= SHOWN_FROM else None


def time_left(seconds: float | None) -> str:
    """Format ``seconds`` as ``, about 1:20 min left``; empty for ``None``."""
    return "" if seconds is None else f", about {clock(seconds)} left"


def clock(seconds: float) -> str:
    """Format ``seconds`` as ``45 s``, ``1:20 min`` or ``2:05 h``."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h" if hours else f"{minutes}:{rest:02d} min"


BETWEEN_LINES, LONGEST_SILENCE = 10, 60  # least and most seconds between two progress lines


class ShareLines:
    """Progress callback that passes a line to ``say`` for each tenth done, at most every 10 s, at least every 60 s."""

    def __init__(self, say: Callable[[str], None], title: str, suffix: Callable[[], str] = str) -> None:
        self._say, self._title, self._suffix, self._pause = say, title, suffix, BETWEEN_LINES
        self._last, self._said_at, self._left, self._silent = 0, time.monotonic(), Remaining(), True

    def __call__(self, done: int, total: int) -> None:
        tenth, seconds = 10 * done // max(total, 1), self._left(self._title, done / max(total, 1))
        due = self._pause if tenth > self._last or self._silent else LONGEST_SILENCE
        if time.monotonic() - self._said_at >= due:
            self._last, self._said_at, self._silent = tenth, time.monotonic(), False
            left = time_left(seconds) if tenth < 10 else ""
            self._say(f"{self._title}{self._suffix()}: {100 * done // max(total, 1)} %{left}")


def _tell(stages: tuple[Stage, ...]) -> None:
    _stages.set(stages)
    if (listener := _listener.get()) is not None:
        listener(stages)


@contextmanager
def within_seconds(seconds: float, late: Exception | None = None) -> Iterator[None]:
    """Raise ``late`` (``TimeoutError``) in the block if it takes longer, again each second; only in the main thread."""
    if threading.current_thread() is not threading.main_thread() or seconds == math.inf:
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise late or TimeoutError(f"it took more than {seconds:.0f} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
