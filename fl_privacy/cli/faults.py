"""Report errors in one line, handle signals, and print text without terminal controls."""

import errno
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fl_privacy.checks.packages import missing_extra
from fl_privacy.errors import UserError, is_out_of_memory, neutral, say, visible, what_was_asked

EXIT_ERROR = 2
EXIT_NOTHING = 3
FAULTS = (UserError, OSError, MemoryError)  # of input, disk and machine: a job keeps its files, and others go on
STOPPING = (*FAULTS, RuntimeError, ImportError, SystemExit)  # exceptions that may be faults, as ``recognized`` decides


class Terminal(Console):
    """Rich's console, on which text can't move the cursor, nor color or reorder other text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else neutral(text), style, control)


class NothingReconstructedError(UserError):
    """Raised if an attack failed on all of its victims; results are kept, and the exit status is ``EXIT_NOTHING``."""


def in_a_line(error: BaseException) -> str:
    """Format the error and its remedy in one line."""
    if isinstance(error, OSError):
        text = _of_the_system(error)
    elif isinstance(error, MemoryError):
        text = (
            f"The work is expected to fit into memory, but does not{f' ({error})' if str(error) else ''};"
            " lower batch_size, victims or --jobs, or give it more (ulimit -v)."
        )
    else:
        text = str(error) or type(error).__name__
    return visible(" ".join(text.split()))


def recognized(error: BaseException) -> BaseException | None:
    """Return ``error`` as one of the ``FAULTS`` that a user can mend; ``None`` if it is a defect of the program."""
    if isinstance(error, click.ClickException):
        said = error.message if "Did you mean" in error.message else error.format_message()  # one suggestion
        words, context = list[str](), error.ctx if isinstance(error, click.UsageError) else None
        while context is not None and context.parent is not None:
            words.insert(0, context.info_name or "")
            context = context.parent
        return UserError(f"{said} `{' '.join(['fl-privacy', *words])} --help` shows how to go on.")
    if isinstance(error, ImportError) and not is_out_of_memory(error):
        return missing_extra(error)
    if isinstance(error, SystemExit):
        return UserError(f"Third-party code is expected to return, but raised SystemExit: {error.code}; correct it.")
    if is_out_of_memory(error):
        return MemoryError(what_was_asked(error))
    return error if isinstance(error, FAULTS) else None


def fail(error: BaseException) -> int:
    """Print ``error`` in one line, and return the exit status for it."""
    say(f"error: {in_a_line(error)}", aside=True)
    return EXIT_NOTHING if isinstance(error, NothingReconstructedError) else EXIT_ERROR


def _of_the_system(error: OSError) -> str:
    what = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or str(error) or type(error).__name__
    kept = "what has been written is kept, `fl-privacy report RUN_DIR` reads it"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"Room to write is expected{f' for {what}' if what else ''}, but there is none ({reason}); {kept}."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"More files are expected to be opened, but the system refuses ({reason}); raise ulimit -n."
    where = f"{what} is expected to be usable, but is not" if what else "The system refused a call"
    return f"{where} ({reason}); check that the folder exists and may be written. {kept[0].upper()}{kept[1:]}."


ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(BaseException):
    """Raised if a signal, ``number``, asks the process to end; unlike KeyboardInterrupt, Typer does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """In the main thread, raise ``Interrupted`` at the first signal to end the process; ignore further ones."""
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
