"""Tables of docs/trees.md, from experiments/rows/trees: settings, three hospitals, the published range, best rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kept_rows import ROWS, escaped, markdown, read_rows

Row = Mapping[str, Any]
USUAL = {"mode": "bagging", "depth": 4, "rate": 0.3, "rounds": 30, "max_bin": 256, "noise": 0.0}
NAMES = {"rate": "learning rate", "max_bin": "`max_bin`", "noise": "noise on sums", "mode": "strategy"}
HOSPITALS = ("Cleveland", "Hungary", "Long Beach VA")
PUBLISHED = {("bagging", 3): 76.0, ("cyclic", 3): 73.05, ("bagging", 6): 80.97, ("cyclic", 6): 79.51}
"""TimberStrike's accuracy, percent of cells, all features (its repository, paper_visualization/stroke)."""


def trees_table(kind: str, folder: Path = ROWS) -> str:
    """One of ``settings``, ``heart``, ``stroke``, ``best``; "Not run." without rows."""
    rows = read_rows("trees", folder)
    made = {"settings": _settings, "heart": _heart, "stroke": _stroke, "best": _best}[kind](rows)
    return made or "Not run."


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _figures(row: Row) -> list[str]:
    """Cells right: attack, first tree alone, another client's rows, own columns shuffled; then rows right."""
    parts = [(row["cells"], row["pinned"]), row["first_tree"], row["others"], row["shuffled"]]
    return [_percent(part[0]) for part in parts] + [_percent(part[1]) for part in (parts[0], parts[2])]


HEADS = [
    "cells right",
    "first tree alone",
    "another client's rows",
    "own columns shuffled",
    "rows right",
    "of another's",
]


def _settings(rows: Sequence[Row]) -> str:
    chosen = [row for row in rows if row["data"] == "heart" and row["client"] == 0 and not row["known"]]
    lines = []
    for row in chosen:
        changed = {k: row[k] for k, usual in USUAL.items() if row[k] != usual}
        name = ", ".join(f"{NAMES.get(k, k)} {v}" for k, v in changed.items()) or "**as above**"
        values = f"{row['values']} of {row['distinct']}"
        counts = {True: "exact", False: "wrong", None: "none"}[row["counts_right"]]
        lines.append([name, *_figures(row)[:1], counts, values, f"{row['auc']:.3f}", f"{row['seconds']:.0f}"])
    heads = ["changed", "cells right", "counts of the first tree", "values leaked", "AUC", "seconds"]
    return markdown(heads, lines) if lines else ""


def _heart(rows: Sequence[Row]) -> str:
    lines = [
        [
            HOSPITALS[row["client"]] + (", next client's rows known" if row["known"] else ""),
            str(row["rows"]),
            *_figures(row),
            _percent(row["labels_certain"]),
        ]
        for row in rows
        if row["data"] == "heart" and all(row[k] == v for k, v in USUAL.items())
    ]
    return markdown(["hospital", "rows", *HEADS, "labels certain"], lines) if lines else ""


def _stroke(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{row['mode']}, depth {row['depth']}" + (", next client's rows known" if row["known"] else ""),
            f"{PUBLISHED[row['mode'], row['depth']]:.1f} %",
            *_figures(row),
            f"{row['seconds']:.0f}",
        ]
        for row in rows
        if row["data"] == "stroke" and (row["mode"], row["depth"]) in PUBLISHED
    ]
    return markdown(["", "TimberStrike, cells", *HEADS, "seconds"], lines) if lines else ""


def _best(rows: Sequence[Row]) -> str:
    parts = []
    for row in rows:
        usual = row["data"] == "heart" and all(row[k] == v for k, v in USUAL.items())
        if not usual or not row["best"]:
            continue
        names = list(row["best"][0]["cells"])
        lines = []
        for name in names:
            cells = []
            for each in row["best"]:
                truth, guess, right = each["cells"][name]
                cells += [_word(truth), f"**{_word(guess)}**" if right else _word(guess)]
            lines.append([name.replace("_", " "), *cells])
        heads = ["", *(f"{what} {k}" for k in range(1, len(row["best"]) + 1) for what in ("row", "guess"))]
        parts.append(f"**{HOSPITALS[row['client']]}**\n\n{markdown(heads, lines)}")
    return "\n\n".join(parts)


def _word(value: Any) -> str:
    return "(none)" if value is None else escaped(f"{value:g}" if isinstance(value, float) else str(value))
