"""Places on this machine that somebody else names: the file of a grid or track, or a run that another machine sends."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath

from fl_privacy.config.overrides import NAMING, expand_sweep, parse_overrides
from fl_privacy.errors import UserError

PLACES = frozenset({"root", "folder", "path", "file", "generator", "policies", "cache", "public", *NAMING})
"""Last parts of keys whose text names something on the machine that reads it."""


def expect_no_place(overrides: Sequence[str], *, where: str, unread: Collection[str] = ()) -> None:
    """Refuse overrides that name a file or a folder of this machine at all, as a run that comes over the network may.

    A setting does so by what it decides (``PLACES``) or by what it says: text that leads outside, or in which a folder
    is parted from what is in it.

    Args:
        overrides: in Hydra's grammar.
        where: they come from, to begin the message with.
        unread: settings that nothing on this machine reads.

    Raises:
        UserError: there is one.
    """
    for override in parse_overrides([text for listed in overrides for (text,) in expand_sweep([listed])]):
        for name, text in _settings(override.key_or_group, override.value()):
            parted = "/" in text or "\\" in text or leads_outside(text)
            if name not in unread and text.strip() and (parted or name.rpartition(".")[2] in PLACES):
                raise UserError(
                    f"{where} is expected to name no file or folder of a node, but sets {name}; whoever runs the node"
                    " says what it trains on, by data-path in its node config."
                )


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


def _settings(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Each setting within ``value`` that is text, by its full name."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _settings(f"{name}.{key}", entry)
    elif not isinstance(value, bool | int | float):
        yield from ((name, text) for text in _texts(value))


def _texts(value: object) -> Iterator[str]:
    """All text within ``value``."""
    if isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for entry in value:
            yield from _texts(entry)
    elif value is not None:
        yield str(value)
