"""Until when work goes on: a search that is given no more time ends with what it has found.

A search says ``for step in timely(range(400))``; who has so many seconds for it says ``with within(5.0)`` around it,
and nobody in between has to pass anything on. Where nobody says so, which is the usual case, the clock is not looked at
and results depend on no machine. Another thread or process does not hear of it.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_end: ContextVar[float] = ContextVar("end", default=math.inf)
"""On the clock of ``time.perf_counter``."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Work in the context has so many seconds from now on, or fewer where the context around it has; infinitely many
    change nothing."""
    before = _end.set(min(_end.get(), time.perf_counter() + seconds))
    try:
        yield
    finally:
        _end.reset(before)


def seconds_left() -> float:
    """At least 0; infinite where there is no end."""
    end = _end.get()
    return end if end == math.inf else max(0.0, end - time.perf_counter())


def timely(items: Iterable[T]) -> Iterator[T]:
    """``items`` one by one while there is time, the first one in any case."""
    for number, item in enumerate(items):
        if number and not seconds_left():
            return
        yield item


def even_share(among: int) -> AbstractContextManager[None]:
    """Around the first of so many pieces of work, which has an even share of the time that is left for them."""
    return within(seconds_left() / among)
