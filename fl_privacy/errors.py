"""The one exception that a user is meant to read, and what makes it of others."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Wrong input, said in one line: what was expected, what was given, what to do about it.

    The command line prints the line and exits with status 2; it never shows a traceback for it.
    """


@contextmanager
def blamed_on(who: str) -> Iterator[None]:
    """Turn whatever ``who``, which may be somebody else's code, raises into a ``UserError`` that names both.

    An interrupt is none of it, nor what the disk or memory did. The traceback stays attached as the cause.
    """
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{who} raised {in_one_line(error)}; --debug shows the traceback.") from error


def in_one_line(error: BaseException) -> str:
    """``KeyError: 'fc' (model.py, line 12)``."""
    text = (str(error).strip() or "without a word").splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"
