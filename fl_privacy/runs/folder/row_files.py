"""Save and load ``reconstructions/rows-*.json``: table rows cell by cell, readable only by their owner."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy.checks import fits
from fl_privacy.files import write_private
from fl_privacy.runs.folder.pictures import new_file, read_each, read_small
from fl_privacy.types.victim_ids import Attacker

if TYPE_CHECKING:
    from fl_privacy.measure import VictimScore

ROW_FILES = "rows-*.json"

_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class RowGuess:
    """A guess at one row of a table.

    Attributes:
        cells: cells as the table writes them.
        right: marks of right cells; empty if the original is not known.
        certain: attacker's certainty of each cell, in [0, 1].
    """

    cells: tuple[str, ...]
    right: tuple[bool, ...]
    certain: tuple[float, ...]


@dataclass(frozen=True)
class RowPair:
    """A row of a table and its guesses.

    Attributes:
        original: original cells; ``None`` if not known.
        guess: plain attacker's guess; ``None`` if its attack failed.
        adaptive: adaptive attacker's guess; ``None`` without one.
    """

    columns: tuple[str, ...]
    original: tuple[str, ...] | None
    guess: RowGuess | None = None
    adaptive: RowGuess | None = None


def write_rows(folder: Path, round: int, scores: Sequence[VictimScore], attacker: Attacker = Attacker.PLAIN) -> Path:
    """Write the reconstructed rows of ``round``; a second call for a round adds a file."""
    found: list[dict[str, Any]] = []
    columns: Sequence[str] = ()
    for score in scores:
        if (own := score.rows) is None:
            continue
        columns = own.columns
        rows = zip(score.images, own.originals, own.guesses, own.right.tolist(), own.certain.tolist(), strict=True)
        for image, original, guess, right, certain in rows:
            found.append(
                {
                    "id": str(score.id),
                    "image": image.image,
                    "original": None if original is None else list(original),
                    "guess": None if guess is None else list(guess),
                    "right": [] if original is None else right,
                    "certain": [float(f"{share:.2f}") for share in certain],
                }
            )
    path = new_file(folder, f"rows-{round:04d}", attacker, ".json")
    content = {"attacker": attacker, "columns": list(columns), "rows": found}
    write_private(path, json.dumps(content, ensure_ascii=False))
    return path


def read_rows(folder: Path) -> tuple[Mapping[tuple[str, int], RowPair], list[str]]:
    """Return the rows of all files in ``folder`` by (victim id, number), and a line on each unreadable one."""
    found: dict[tuple[str, int], RowPair] = {}

    def read(path: Path) -> None:
        content = read_small(path, _MOST_BYTES)
        columns, adaptive = content["columns"], content["attacker"] == Attacker.ADAPTIVE
        if not fits(columns, list[str]):
            raise ValueError("its columns are none")
        for row in content["rows"]:
            key = (row["id"], row["image"])
            original, guess = _read(row, columns)
            known = found.setdefault(key, RowPair(tuple(columns), original))
            found[key] = replace(known, adaptive=guess) if adaptive else replace(known, guess=guess)

    return found, read_each(folder.glob(ROW_FILES), read)


def _read(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[tuple[str, ...] | None, RowGuess | None]:
    original, guess, right, certain = (row[name] for name in ("original", "guess", "right", "certain"))
    sound = fits([row["id"], row["image"]], list[str | int]) and fits(right, list[bool])
    sound = sound and all(fits(cells, list[str] | None) for cells in (original, guess))
    sound = sound and fits(certain, list[float])
    sizes = {len(cells) for cells in (original, guess, right or None, certain) if cells is not None}
    if not sound or sizes != {len(columns)}:
        raise ValueError("a row is none")
    read = None if guess is None else RowGuess(tuple(guess), tuple(right), tuple(map(float, certain)))
    return None if original is None else tuple(original), read
