"""Until when work goes on: a search that is given no more time ends with what it has found.

A search says ``for step in timely(range(400))``; who has so many seconds for it says ``with within(5.0)`` around it,
and nobody in between has to pass anything on. Where nobody says so, which is the usual case, nothing depends on the
clock. Another thread or process does not hear of it.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Limit:
    """Of the time that work has.

    Attributes:
        end: on the clock of ``time.perf_counter``.
        around: that of the work which this is a part of.
        cut: whether a search within it was ended by the clock.
    """

    end: float = math.inf
    around: "Limit | None" = None
    cut: bool = False


_limit: ContextVar[Limit | None] = ContextVar("limit", default=None)


@contextmanager
def within(seconds: float) -> Iterator[Limit]:
    """Work in the context has so many seconds from now on, or fewer where the context around it has; infinitely many
    change nothing."""
    around = _limit.get()
    limit = Limit(time.perf_counter() + min(seconds, seconds_left()), around)
    before = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(before)


def even_share(among: int) -> AbstractContextManager[Limit]:
    """Around the first of so many pieces of work, which has an even share of the time that is left for them."""
    return within(seconds_left() / among)


def seconds_left() -> float:
    """At least 0; infinite where there is no end."""
    limit = _limit.get()
    return math.inf if limit is None or limit.end == math.inf else max(0.0, limit.end - time.perf_counter())


def timely(items: Iterable[T]) -> Iterator[T]:
    """``items`` one by one while there is time, the first one in any case."""
    for number, item in enumerate(items):
        if number and not seconds_left():
            limit = _limit.get()
            while limit is not None:
                limit.cut, limit = True, limit.around
            return
        yield item
