"""Places on this machine that the file of somebody else's grid or track names."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath

from fl_privacy.config.overrides import expand_sweep, parse_overrides
from fl_privacy.errors import UserError


def expect_below_here(overrides: Sequence[str], *, where: str) -> None:
    """Refuse overrides with a value that leads out of the working directory, whatever setting it is of.

    Args:
        overrides: in Hydra's grammar.
        where: they come from, to begin the message with.

    Raises:
        UserError: a value is an absolute path, one of a home folder, or goes up by ``..``.
    """
    for override in parse_overrides([text for listed in overrides for (text,) in expand_sweep([listed])]):
        if any(map(leads_outside, _texts(override.value()))):
            text = (override.input_line or "")[:80]
            raise UserError(
                f"{where} is expected to name no place outside of the working directory, but has {text!r}; take it out"
                " of the file and say it on the command line."
            )


def leads_outside(text: str) -> bool:
    """Whether ``text``, taken for a path, may lead out of the working directory; on Windows too."""
    posix, windows = PurePosixPath(text), PureWindowsPath(text)
    absolute = posix.is_absolute() or bool(windows.drive or windows.root)
    return absolute or text.startswith("~") or ".." in (*posix.parts, *windows.parts)


def _texts(value: object) -> Iterator[str]:
    """All text within ``value``."""
    if isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for entry in value:
            yield from _texts(entry)
    elif value is not None:
        yield str(value)
