"""Save and load ``paper.json``: what a paper publishes next to the figures of its preset and of its baselines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.files.foreign import read_text
from fl_privacy.runs.folder.records import dump_json, parse_json, wrong_field

PAPER = "paper.json"
_MOST_BYTES = 1 << 20

_TEXTS = ("title", "at", "ours", "about", "picture")
_LISTS = {"notes": list[str], "columns": list[str], "strips": list[list[str]], "lines": list[Mapping[str, Any]]}
FIELDS: Mapping[str, Any] = {**dict.fromkeys(_TEXTS, str), **_LISTS}
"""Fields of the record; ``at`` names data and network of the published figures, ``ours`` those of ours, and ``strips``
rows of the picture: title, line, and kind of image (a field of ``Pair``)."""

LINE: Mapping[str, Any] = {"name": str, "folders": list[list[str]], "figures": list[list[float | None]]}
"""Fields of a line: names of the runs of each strength, next to the record's folder, and for each column the published
figure, ours, the ends of its 95 % interval and the number of examples or strengths; ``None`` if not known."""


def write_paper(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``paper.json`` into ``folder``."""
    write_whole(folder / PAPER, dump_json(record, indent=1))


def read_paper(folder: Path) -> Mapping[str, Any] | None:
    """Load the record in ``folder``, if any; ``UserError`` if the file is damaged."""
    if not (folder / PAPER).is_file():
        return None
    try:
        found = parse_json(read_text(folder / PAPER, _MOST_BYTES))
        wrong = wrong_field(found, FIELDS) or next(filter(None, (wrong_field(of, LINE) for of in found["lines"])), None)
        if not wrong:
            sizes = {(len(figure), 5) for of in found["lines"] for figure in of["figures"]}
            sizes |= {(len(strip), 3) for strip in found["strips"]}
            sizes |= {(len(of["figures"]), len(found["columns"])) for of in found["lines"]}
            names = [name for of in found["lines"] for runs in of["folders"] for name in runs]
            wrong = "a list has another length" if any(own != expected for own, expected in sizes) else None
            wrong = (
                "a folder has more than a name" if any(Path(n).name != n or n in {"", ".."} for n in names) else wrong
            )
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise UserError(f"{folder / PAPER} is expected to hold a paper's table, but {wrong}; remove it.")
    assert isinstance(found, Mapping)
    return found
