"""How far long work is: told to whoever listens around it, to nobody otherwise.

Work deep inside a client says ``for k in counted("condensing images", range(200))``; a command listens around the whole
round. In between nobody has to pass anything on. Another thread or process does not hear it.
"""

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


def _tell(stages: tuple[Stage, ...]) -> None:
    _stages.set(stages)
    if (listener := _listener.get()) is not None:
        listener(stages)
