"""Kinds of guesses by data sets: how often the package calls each read, and how often a bound on PSNR alone does."""

from collections.abc import Sequence
from pathlib import Path

from kept_rows import ROWS, Row, markdown, read_rows

AIMS = {"to be read": "at least 95 %", "not to be read": "at most 1 %"}
PARTS = ("", ", turned or in pieces", ", alike", ", held back", ", further")
DATA = ("mnist", "fashion_mnist", "cifar10_exact", "olivetti", "lfw", "tiny_imagenet")


def pairs_table(name: str, folder: Path = ROWS) -> str:
    """Render the verdict rows of ``name`` as tables, one for each group of kinds; "Not run." without any."""
    rows = [row for row in read_rows(name, folder) if row["split"] == "test"]
    there = {row["group"] for row in rows}
    parts = [_of_group(rows, aim + part) for part in PARTS for aim in AIMS if aim + part in there]
    return "\n\n".join(parts) or "Not run."


def _of_group(rows: Sequence[Row], group: str) -> str:
    own = [row for row in rows if row["group"] == group]
    sets = sorted({row["data"] for row in own}, key=DATA.index)
    heads = [f"{data} ({_sizes(own, data)})" for data in sets]
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in own):
        cells = [next((_cell(row) for row in own if (row["data"], row["kind"]) == (data, kind)), "") for data in sets]
        lines.append([kind, *cells])
    title = f"**{group[0].upper()}{group[1:]}** (aim: {AIMS[group.split(',', maxsplit=1)[0]]} of each)"
    return f"{title}\n\n{markdown(['', *heads], lines)}"


def _cell(row: Row) -> str:
    met = row["read"] >= 0.95 if row["group"].startswith("to be read") else row["read"] <= 0.01
    read = f"{100 * row['read']:.1f}".removesuffix(".0")
    return f"{read if met else f'**{read}**'} ({100 * row['old']:.0f})"


def _sizes(rows: Sequence[Row], data: str) -> str:
    """Say how many images and how many candidates each has, like ``200 of 1000``."""
    of = [row for row in rows if row["data"] == data]
    images = "/".join(dict.fromkeys(str(row["images"]) for row in of))
    return f"{images} among {'/'.join(dict.fromkeys(str(row['candidates']) for row in of))}"
