"""``UserError``, the exception whose message users see, and conversions of other exceptions to it."""

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


class UserError(Exception):
    """Wrong input; the message says in one line what was expected, what was given, and the remedy.

    The command line prints the line without traceback and exits with status 2.
    """


@contextmanager
def blamed_on(who: str) -> Iterator[None]:
    """Turn an exception within the context into a ``UserError`` that begins with ``who``, the code to blame.

    ``UserError``, interrupts, and errors of disk and memory pass through.
    """
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise MemoryError(what_was_asked(error)) from error
        raise UserError(f"{who} raised {in_one_line(error)}; --debug shows the traceback.") from error


_ODD = re.compile(
    "[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001-\U000e007f]"
)
"""Characters that move the cursor, or that color, hide or reorder other text; without newline and tab."""


def neutral(text: str) -> str:
    """Replace control characters of untrusted ``text``, except newline and tab, by spaces."""
    return text if text.isascii() and text.isprintable() else _ODD.sub(" ", text)


def say(text: object, *, aside: bool = False) -> None:
    """Print ``text`` without control characters, to standard output, or with ``aside`` to standard error."""
    print(neutral(str(text)), file=sys.stderr if aside else sys.stdout, flush=True)


def visible(text: str) -> str:
    """Replace line breaks and all other unprintable characters of ``text`` by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "failed to map segment")


def is_out_of_memory(error: BaseException) -> bool:
    """Return ``True`` for a ``RuntimeError`` or ``ImportError`` by which PyTorch reports that memory ran out."""
    return isinstance(error, RuntimeError | ImportError) and any(said in str(error).lower() for said in _NO_MEMORY)


def what_was_asked(error: BaseException) -> str:
    """Return what a failed allocation asked for: ``313.6 TB at once``, ``to load LIBRARY``, or "" if unknown."""
    if isinstance(error, ImportError):
        return f"to load {visible(str(error)).partition(':')[0]}"
    found = re.search(r"allocate ([0-9.]+) ?(bytes|[KMGT]i?B)", str(error))
    if found is None:
        return ""
    size, unit = float(found[1]), found[2]
    if unit == "bytes":
        power = min((len(found[1].partition(".")[0]) - 1) // 3, len(UNITS) - 1)
        size, unit = size / 1000**power, UNITS[power]
    return f"{size:.4g} {unit} at once"


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message without its period, or its class name if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


_NOT_OWN = "|".join(re.escape(str(place)) for place in (sysconfig.get_path("stdlib"), Path(__file__).parent))
_INSTALLED = re.compile(rf"<|({_NOT_OWN}|.*[/\\](site|dist)-packages)[/\\]")


def in_one_line(error: BaseException) -> str:
    """Format an error as ``KeyError: 'fc' (model.py, line 12)``: class, message, place in the code, and cause."""
    first, *rest = (re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or "without a word").splitlines()  # of colors
    more = rest if first.endswith(":") else [each for each in rest if re.search(r"\w\.py\b", each)]  # to be run first
    text = " ".join([first, *(each.strip()[:200] for each in more[:1])])  # as PyTorch lists keys
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in each.filename]
    own = [each for each in frames if not _INSTALLED.match(each.filename)]
    places = dict.fromkeys(f"{Path(each.filename).name}, line {each.lineno}" for each in (*frames[-1:], *own[-1:]))
    place = f" ({', called in '.join(places)})" if places else ""
    last = error
    for _ in range(9):  # causes may go round
        left = last.__context__ if isinstance(last, NameError) else None  # by which a name was left without a value
        last = last.__cause__ or left or last
    said = f"{type(error).__name__}: {text}{place}"
    if last is error or isinstance(error, UserError):
        return said
    return f"{said}, caused by {' '.join(f'{type(last).__name__}: {last}'.split())[:200]}"
