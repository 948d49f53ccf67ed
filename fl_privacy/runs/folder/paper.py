"""Save and load ``paper.json``: what a paper publishes next to the figures of its preset and of its baselines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import read_text
from fl_privacy.runs.folder.records import dump_json, each, made, parse_json

PAPER = "paper.json"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure as published, and ours over ``n`` examples or runs with the 95 % interval; ``None`` if not known."""

    published: float | None
    ours: float | None
    ci95: Sequence[float] | None
    n: int


@dataclass(frozen=True, kw_only=True)
class PaperLine:
    """A line of a paper's table; ``folders`` are names of its runs, next to the folder that holds the record."""

    name: str
    folders: Sequence[str]
    figures: Sequence[PaperFigure]


@dataclass(frozen=True, kw_only=True)
class PaperRecord:
    """A paper's table.

    Attributes:
        at: data and network of the published figures; ``ours`` those of ours.
        notes: differences between the paper's settings and ours, a sentence each.
        strips: rows of the picture: title, line, and the kind of image (a field of ``Pair``).
    """

    title: str
    at: str
    ours: str
    about: str
    notes: Sequence[str]
    columns: Sequence[str]
    lines: Sequence[PaperLine]
    picture: str
    strips: Sequence[Sequence[str]]


def write_paper(folder: Path, record: PaperRecord) -> None:
    """Write ``paper.json`` into ``folder``."""
    write_whole(folder / PAPER, dump_json(asdict(record), indent=1))


def read_paper(folder: Path) -> PaperRecord | None:
    """Load the record in ``folder``, if any; ``UserError`` if the file is damaged."""
    if not (folder / PAPER).is_file():
        return None
    line = partial(made, PaperLine, figures=partial(each, partial(made, PaperFigure)))
    try:
        found = made(PaperRecord, parse_json(read_text(folder / PAPER, _MOST_BYTES)), "it", lines=partial(each, line))
        uneven = any(len(one.figures) != len(found.columns) for one in found.lines)
        if uneven or any(len(strip) != 3 for strip in found.strips):
            raise ValueError("its lines or strips are not as long as its columns")
        if any(Path(name).name != name or name in {"", ".."} for one in found.lines for name in one.folders):
            raise ValueError("a folder is not named by its name alone")
    except ValueError as error:
        raise UserError(f"{folder / PAPER} is expected to hold a paper's table, but {error}; remove it.") from error
    return found
