"""How far long work is: told to whoever listens around it, to nobody otherwise.

Work deep inside a client says ``for k in counted("condensing images", range(200))``; a command listens around the whole
round. In between nobody has to pass anything on. Another thread or process does not hear it. The words for it are here,
too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """Work that goes on: ``done`` of ``total`` steps of ``what``."""

    what: str
    done: int
    total: int


Listener = Callable[[tuple[Stage, ...]], None]
"""Told of all stages that go on, the outermost first; an empty tuple when the last one is over."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_stages: ContextVar[tuple[Stage, ...]] = ContextVar("stages", default=())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report the steps taken within the context to ``listener``, in place of any listener outside."""
    before, around = _listener.set(listener), _stages.set(())
    try:
        yield
    finally:
        _listener.reset(before)
        _stages.reset(around)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yield ``items`` one by one; before each, report how many are done.

    Args:
        what: of which there are several, in the singular (``client``), or what is being done (``condensing images``).
        items: of the work.
    """
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
    """Return how much of the outermost stage is done, in [0, 1], steps within a step counted as parts of it."""
    share = 0.0
    for stage in reversed(stages):
        share = min((stage.done + share) / max(stage.total, 1), 1.0)
    return share


def describe(stages: tuple[Stage, ...]) -> str:
    """Describe the step that each stage is at, ``client 2/3, condensing images 57/200``."""
    return ", ".join(f"{s.what} {min(s.done + 1, s.total)}/{s.total}" for s in stages)


def at_work(stages: tuple[Stage, ...]) -> str:
    """Describe the stages as :func:`describe` does, but leave out the step where there is only one.

    Such as ``exact 2/3`` or ``cocktail party, victim 3/8``.
    """
    return ", ".join(describe((stage,)) if stage.total > 1 else stage.what for stage in stages)


SHOWN_FROM = 0.05
"""Below this share of the work nothing can be said: what starts up would count as many times over."""


class Remaining:
    """Time left of one piece of work after the other."""

    def __init__(self) -> None:
        self._work: object = None
        self._started = time.monotonic()
        self._from = 0.0

    def __call__(self, work: object, share: float) -> float | None:
        """Return the seconds left of ``work``, of which ``share`` in [0, 1] is done; ``None`` while nobody knows.

        Another ``work`` than the last time starts the clock anew.
        """
        now = time.monotonic()
        if work != self._work or share < self._from:
            self._work, self._started, self._from = work, now, share
        done = share - self._from
        return (now - self._started) * (1 - share) / done if done >= SHOWN_FROM else None


def time_left(seconds: float | None) -> str:
    """Format the time left, ``, about 1:20 min left``; empty while nobody knows."""
    return "" if seconds is None else f", about {clock(seconds)} left"


def clock(seconds: float) -> str:
    """Format a time: ``45 s``, ``1:20 min``, ``2:05 h``."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h" if hours else f"{minutes}:{rest:02d} min"


LONGEST_SILENCE = 60
"""Seconds."""


class ShareLines:
    """Says in lines how far work is: soon after its start, at each tenth, and at least once a minute.

    Args:
        say: prints a line.
        title: of the work.
        beside: what of it is being done; asked anew for each line.
        pause: seconds that lie between lines at least.
    """

    def __init__(
        self, say: Callable[[str], None], title: str, beside: Callable[[], str] = str, *, pause: float = 10
    ) -> None:
        self._say, self._title, self._beside, self._pause = say, title, beside, pause
        self._last, self._said_at, self._left, self._silent = 0, time.monotonic(), Remaining(), True

    def __call__(self, done: int, total: int) -> None:
        """Say that ``done`` of ``total`` steps are over, if it is time to."""
        tenth, seconds = 10 * done // max(total, 1), self._left(self._title, done / max(total, 1))
        due = self._pause if tenth > self._last or self._silent else LONGEST_SILENCE
        if time.monotonic() - self._said_at >= due:
            self._last, self._said_at, self._silent = tenth, time.monotonic(), False
            left = time_left(seconds) if tenth < 10 else ""
            self._say(f"{self._title}{self._beside()}: {100 * done // max(total, 1)} %{left}")


def _tell(stages: tuple[Stage, ...]) -> None:
    _stages.set(stages)
    if (listener := _listener.get()) is not None:
        listener(stages)
