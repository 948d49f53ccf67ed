"""Signals that end a command, as one exception."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(BaseException):
    """The process was asked to end by the signal ``number``; no KeyboardInterrupt, of which Typer makes a status."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``Interrupted`` where a signal asks the process to end, once: a second does not stop the cleaning."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_status(interrupt: BaseException) -> int:
    """As shells say it: 128 and the signal's number, 130 for Ctrl-C."""
    return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)
