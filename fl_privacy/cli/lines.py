"""Progress where there is no terminal, as in a log file: a line now and then."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

from fl_privacy.cli.timing import clock


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
        while not self._over.wait(max(self._pause / 2, 0.1)):
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
