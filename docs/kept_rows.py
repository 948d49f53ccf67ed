"""Rows that experiments have left in ``experiments/rows/NAME/rows.jsonl``: read, chosen, told in Markdown.

What pages and ``make results`` show of measurements comes from here alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROWS = Path(__file__).resolve().parent.parent / "experiments" / "rows"
TABLES = Path(__file__).resolve().parent / "tables.yaml"
NOT_RUN = "not run"

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure with its 95 % interval and the size of its sample, where these are known."""

    mean: float
    low: float | None = None
    high: float | None = None
    n: int | None = None

    def times(self, factor: float) -> "Measured":
        """Convert the figure and its interval to another unit by multiplying with ``factor``."""
        ends = (None if end is None else factor * end for end in (self.low, self.high))
        low, high = ends
        return replace(self, mean=factor * self.mean, low=low, high=high)


def read_rows(name: str, folder: Path = ROWS) -> list[Row]:
    """Load the rows of experiment ``name``; return none if it has not been run."""
    path = folder / name / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


class Kept:
    """All kept rows, each file read once."""

    def __init__(self, folder: Path = ROWS) -> None:
        self.folder = folder
        self._rows: dict[str, list[Row]] = {}

    def __getitem__(self, name: str) -> list[Row]:
        if name not in self._rows:
            self._rows[name] = read_rows(name, self.folder)
        return self._rows[name]


def value_of(row: Row, name: str) -> Any:
    """Look up a field of a row, of its run's settings, or within a field (``figures.bpmse``)."""
    if name in row:
        return row[name]
    settings = row.get("settings")
    if isinstance(settings, Mapping) and name in settings:
        return settings[name]
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return value_of(inner, rest) if rest and isinstance(inner, Mapping) else None


def choose(rows: Sequence[Row], where: Mapping[str, Any]) -> Row | None:
    """Find the one row that matches ``where``, in which ``any`` allows every value; ``None`` if there is none.

    Raises:
        ValueError: several rows fit.
    """
    asked = {name: value for name, value in where.items() if value != "any"}
    found = [row for row in rows if all(value_of(row, name) == value for name, value in asked.items())]
    if len(found) > 1:
        raise ValueError(f"{dict(where)} is expected to choose one row, but chooses {len(found)}; name more of them.")
    return found[0] if found else None


def measured(
    row: Row, of: str, *, interval: Sequence[str] = (), n: str | None = None, share: str | None = None
) -> Measured | None:
    """Take one measured figure from ``row``; ``None`` if the row lacks it.

    Args:
        row: it is read from.
        of: its name; a statistic (``mean``, ``ci95``, ``n``), a measure (``value``, ``low``, ``high``) or a number.
        interval: names of the ends of its interval, for a number.
        n: name of the size of its sample.
        share: likewise, of a number that is a share of so many; its interval is Clopper and Pearson's.
    """
    value = value_of(row, of)
    size = value_of(row, n or share or "n")
    match value:
        case {"mean": mean}:
            low, high = value.get("ci95") or (None, None)
            return Measured(mean=float(mean), low=low, high=high, n=value.get("n"))
        case {"value": mean}:
            return Measured(mean=mean, low=value.get("low"), high=value.get("high"), n=size)
        case bool() | None | Mapping():
            return None
        case int() | float() | "inf":
            low, high = (value_of(row, end) for end in interval) if interval else (None, None)
            if share:
                low, high = exact_interval(round(value * size), size)
            return Measured(mean=float(value), low=low, high=high, n=size)
    return None


@cache
def exact_interval(count: int, size: int) -> tuple[float, float]:
    """Compute Clopper and Pearson's 95 % interval, which takes milliseconds, of ``count`` among ``size``."""
    from scipy.stats import binomtest  # noqa: PLC0415

    found = binomtest(count, size).proportion_ci(method="exact")
    return float(found.low), float(found.high)


def rows_table(name: str, folder: Path = ROWS, columns: Sequence[str] = ()) -> str:
    """Render all rows of ``name`` as tables, one for each kind of rows; "Not run." without any.

    If ``tables.yaml`` has an entry ``name``, the rows are one table with its columns and words.

    Args:
        name: name of the folder with the rows.
        folder: folder that holds it.
        columns: fields to show; all if empty.
    """
    if not columns and (stated := yaml.safe_load(TABLES.read_text(encoding="utf-8")).get(name)):
        return _stated_table(read_rows(name, folder), stated["columns"], stated.get("words", {}))
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in read_rows(name, folder):
        kinds.setdefault((next(iter(row)), row.get("server", "")), []).append(row)
    return "\n\n".join(_rows_of_a_kind(rows, columns) for rows in kinds.values()) or "Not run."


def honest_table(name: str, folder: Path = ROWS) -> str:
    """Sum up, per mechanism with a true claim, how often seeds were accused and bounds exceeded the claim."""
    sums: dict[str, list[int]] = {}
    for row in read_rows(name, folder):
        found = sums.setdefault(row["mechanism"], [0, 0, 0, row["draws"]])
        for place, of in enumerate(("seeds", "accused", "above")):
            found[place] += row[of]
    if not sums:
        return "Not run."
    total = [sum(found[place] for found in sums.values()) for place in range(3)]
    lines = [[name, f"{d:,}", str(n), str(a), str(b)] for name, (n, a, b, d) in sums.items()]
    lines.append(["**all**", "", *(f"**{each}**" for each in total)])
    return markdown(
        ["mechanism", "draws of a check", "checks", "claim called false", "lower bound above the claim"], lines
    )


def audits_table(name: str, folder: Path = ROWS) -> str:
    """Sum up the examples that audits of the same settings reconstructed, with the first line of the first page."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in read_rows(name, folder):
        groups.setdefault(tuple(row[each] for each in _OF_AUDITS), []).append(row)
    lines = []
    for key, rows in groups.items():
        found, of, control = (sum(row.get(each) or 0 for row in rows) for each in ("reconstructed", "of", "control"))
        share = measured({"share": found / of, "of": of}, "share", share="of")
        assert share is not None and share.low is not None and share.high is not None
        ends, asked = (
            f"{100 * share.low:.0f} to {100 * share.high:.0f} %",
            sum(row.get("control") is not None for row in rows),
        )
        shown = f"{control} of {of}" if asked == len(rows) else ""
        first = next((row for row in rows if "begin" in row), None)
        begin = f"{first['begin']} of {first['convolutions']}" if first else ""
        *settings, budget = map(str, key)
        budget = f"{budget} seconds" if budget.isdigit() else budget
        lines.append([*settings, budget, f"{found} of {of}", ends, shown, begin, rows[0]["first_line"]])
    begins = "convolutions at which equations behind blocks begin"
    heads = [*_OF_AUDITS, "reconstructed", "95 % interval", "control", begins, "first line of a page"]
    return markdown(heads, lines) if lines else "Not run."


_OF_AUDITS = ("network", "percentile", "gamma", "budget")


def batches_table(name: str, folder: Path = ROWS) -> str:
    """Render means over the batches of a table's rows, by their settings; "Not run." without any."""
    groups: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    for row in read_rows(name, folder):
        key = tuple((each, row[each]) for each in _SETTINGS if each in row)
        groups.setdefault(key, []).append(row)
    if not groups:
        return "Not run."
    ordered = sorted(groups.items(), key=lambda pair: [str(v) if isinstance(v, str) else v for _, v in pair[0]])
    shown = [each for each in _OF_BATCHES if any(each in row for _, rows in ordered for row in rows)]
    heads = [each for each, _ in ordered[0][0]] + ["batches"] + [_OF_BATCHES[each] for each in shown]
    lines = [
        [*(f"{value:g}" if isinstance(value, float) else f"{value}" for _, value in key), f"{len(rows)}"]
        + [_mean_of(each, [float(row[each]) for row in rows if each in row]) for each in shown]
        for key, rows in ordered
    ]
    if name in _QUOTED:
        heads.append("cells, Table 1 of the paper as quoted")
        lines = [[*line, _QUOTED[name].get(line[0], "")] for line in lines]
    return markdown(heads, lines)


_SETTINGS = ("size", "noise", "steps", "minibatch", "epochs", "model")

_QUOTED: Mapping[str, Mapping[str, str]] = {"tables_cells": {"8": "95.2 % (deviation 8.8)", "128": "71.4 %"}}
"""Experiment -> size of a batch -> TabLeak on Adult in Table 1 (page 6) of arXiv:2210.01785, as two public notes on
reproducing it quote that table: of 8 over 50 batches, labels known; of 128 they do not say; no other size is quoted."""

_OF_BATCHES = {
    "cells": "cells right",
    "rows": "rows right",
    "read": "rows above the control",
    "their_cells": "cells, authors' program",
    "their_rows": "rows, authors' program",
    "usual_cells": "cells of the usual row",
    "band_cells": "95 % band without the update",
    "proven": "batches proven",
    "wrong": "proven and wrong",
    "cpu_seconds": "CPU seconds a batch",
    "their_cpu_seconds": "CPU seconds, authors' program",
}
"""Figure of a batch -> head of its column."""


def _mean_of(figure: str, values: Sequence[float]) -> str:
    """Aggregate a figure over batches: the mean of seconds, the sum of counts, shares with a 95 % interval."""
    if not values:
        return ""
    mean = sum(values) / len(values)
    if figure.endswith("seconds"):
        return f"{mean:.2f}" if mean < 1 else f"{mean:.1f}"
    if figure in ("proven", "wrong"):
        return f"{sum(values):.0f}"
    if len(values) < 2 or figure.endswith("_cells"):
        return f"{mean:.1%}"
    spread = 1.96 * (sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)) ** 0.5
    return f"{mean:.1%} ± {100 * spread:.1f}"


def attacks_table(name: str, folder: Path = ROWS) -> str:
    """Render attacks by networks: mean PSNR in dB, share recognizable, and what ``auto`` proved."""
    cells: dict[str, dict[str, str]] = {}
    rows = read_rows(name, folder)
    for row in rows:
        trained = "trained" if row["trained"] else "untrained"
        found = cells.setdefault(f"{row['model']}, {trained}, batch {row['batch']}", {})
        if row["attack"] == "auto":
            found.update(uploads=f"{row['victims']}", seconds=f"{row['seconds']:.1f}", proven=f"{row['proven']:.0%}")
        found[f"`{row['attack']}`"] = _read_of(row)
    if not cells:
        return "Not run."
    known = [column for found in cells.values() for column in found]
    columns = list(dict.fromkeys(("uploads", "seconds", "proven", "`auto`", *known)))
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {cell} | {' | '.join(found.get(each, '') for each in columns)} |" for cell, found in cells.items()]
    told = (
        f"Mean PSNR in dB of all images of a cell (`data={_each(rows, 'data')}`), and the share of them above"
        f" {_each(rows, 'recognizable_above')} dB, at the CPU seconds that `auto` takes for an upload; of how many"
        " uploads, where an attack answers for some alone; proven: share of the uploads that `auto` proves exact;"
        f" `python experiments/{name}.py --out experiments/rows/{name}`."
    )
    return "\n".join([told, "", *lines])


def _read_of(row: Row) -> str:
    if row["failures"] == row["victims"]:
        return "does not apply"
    answered = f" ({row['victims'] - row['failures']} of {row['victims']})" if row["failures"] else ""
    return f"{row['psnr']:.1f}, {row['recognizable']:.0%}{answered}"


def _each(rows: Sequence[Row], name: str) -> str:
    """List the distinct values that rows have for a field, in words."""
    return " or ".join(dict.fromkeys(_told(row[name]) for row in rows))


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Render a table in Markdown."""
    whole = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in whole)


def escaped(text: str) -> str:
    """Escape text so that a cell of a Markdown table can hold it."""
    return text.replace("|", "\\|")


def _stated_table(rows: Sequence[Row], columns: Mapping[str, str], words: Mapping[Any, str]) -> str:
    """Render rows as one table, a column for each head in ``columns``; "Not run." without rows.

    Args:
        rows: rows to show.
        columns: head -> what its cells say, with fields and their formats in braces; a cell without a field is empty.
        words: value -> what is shown in its place.
    """

    def shown(row: Row, field: str) -> str:
        name, _, form = field.partition(":")
        value = value_of(row, name)
        known = isinstance(value, str | bool) and value in words
        return words[value] if known else format(value, form) if form and value is not None else _told(value)

    def cell(row: Row, form: str) -> str:
        fields = {field: shown(row, field) for field in re.findall(r"{(.+?)}", form)}
        return re.sub(r"{(.+?)}", lambda field: fields[field[1]], form) if all(fields.values()) else ""

    lines = [[cell(row, form) for form in columns.values()] for row in rows]
    return markdown(list(columns), lines) if lines else "Not run."


def _rows_of_a_kind(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Render one kind of rows, with a column for every figure that one of them has."""
    known = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    names = list(columns or known)
    heads = [name.rpartition(".")[2].replace("_", " ") for name in names]
    return markdown(heads, [[_told(value_of(row, name)) for name in names] for row in rows])


def _told(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        if "mean" in value:
            ends = value.get("ci95")
            return _told(value["mean"]) + (f" [{_told(ends[0])}, {_told(ends[1])}]" if ends else "")
        return ", ".join(f"{name} {_told(each)}" for name, each in value.items())
    return "" if value is None else escaped(str(value))
