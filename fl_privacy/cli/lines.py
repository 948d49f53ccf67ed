"""Progress in words: how long work is going to take, and where there is no terminal, a line now and then."""

import threading
import time
from collections.abc import Callable
from types import TracebackType


class Lines:
    """Says what it is told, but no more often than every ``pause`` seconds; a step that lasts longer is said again.

    Args:
        say: prints a line.
        pause: in seconds.
        silent: nothing is to be said.
    """

    def __init__(self, say: Callable[[str], None], pause: float, *, silent: bool) -> None:
        self._say, self._pause, self._silent = say, pause, silent
        self._text, self._since = "", time.monotonic()
        self._said = self._since
        self._over, self._lock = threading.Event(), threading.Lock()
        self._beat = threading.Thread(target=self._repeat, daemon=True)

    def tell(self, text: str) -> None:
        """``text`` is what happens from now on; empty while nothing does."""
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
                    self._say(f"{self._text} (for {clock(now - self._since)})")

    def __enter__(self) -> "Lines":
        if not self._silent:
            self._beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._beat.is_alive():
            self._beat.join()


SHOWN_FROM = 0.01
"""Below this share of the work nothing can be said."""


class Remaining:
    """Time left of one piece of work after the other."""

    def __init__(self) -> None:
        self._work: object = None
        self._started = time.monotonic()
        self._from = 0.0

    def __call__(self, work: object, share: float) -> float | None:
        """Seconds left of ``work``, of which ``share`` in [0, 1] is done; ``None`` while nobody knows.

        Another ``work`` than the last time starts the clock anew.
        """
        now = time.monotonic()
        if work != self._work or share < self._from:
            self._work, self._started, self._from = work, now, share
        done = share - self._from
        return (now - self._started) * (1 - share) / done if done >= SHOWN_FROM else None


def time_left(seconds: float | None) -> str:
    """``, about 1:20 min left``; empty while nobody knows."""
    return "" if seconds is None else f", about {clock(seconds)} left"


def clock(seconds: float) -> str:
    """``45 s``, ``1:20 min``, ``2:05 h``."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h" if hours else f"{minutes}:{rest:02d} min"
