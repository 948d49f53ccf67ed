"""How long work is going to take, by how long it has taken."""

import time

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


def in_words(seconds: float | None) -> str:
    """``, about 1:20 min left``; empty while nobody knows."""
    return "" if seconds is None else f", about {clock(seconds)} left"


def clock(seconds: float) -> str:
    """``45 s``, ``1:20 min``, ``2:05 h``."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h" if hours else f"{minutes}:{rest:02d} min"
