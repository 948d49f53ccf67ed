"""Show the attacked rows of a table: original next to guess, certain cells in bold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_privacy.measure.registry import TABLE_METRIC
from fl_privacy.report.gallery import SHOWN, ExampleView, described, from_many, rank_by
from fl_privacy.report.words import metric
from fl_privacy.runs.folder import Run
from fl_privacy.runs.folder.pictures import RowGuess, RowPair

CAPTION = ("cells_right", "categories_right", "numbers_right")

SURE = 0.9
"""Least certainty of a cell shown as certain."""

_RANKS = ("Best", "Second", "Third")


@dataclass(frozen=True)
class RowCell:
    """A guessed cell: right, wrong, or plain if not known, and ``True`` if the attacker is certain."""

    text: str
    kind: str
    certain: bool


@dataclass(frozen=True)
class RowLine:
    """One column of a row: name, original cell, and each attacker's cell."""

    column: str
    original: str
    guess: RowCell | None
    adaptive: RowCell | None


@dataclass(frozen=True, kw_only=True)
class RowView(ExampleView):
    """One attacked row, column by column."""

    lines: Sequence[RowLine]
    known: bool
    adaptive: bool


def all_rows(run: Run, found: Mapping[tuple[str, int], RowPair]) -> list[RowView]:
    """View the first ``SHOWN`` attacked rows."""
    return [_view(record, found) for record in run.of_kind("image")[:SHOWN]]


def best_rows(run: Run, found: Mapping[tuple[str, int], RowPair]) -> list[RowView]:
    """View the three rows with most right cells, from different clients and uploads if possible."""
    ranked = rank_by(run, TABLE_METRIC)
    ranks = ("", "", "") if _equal(ranked) else _RANKS
    return [_view(record, found, rank) for rank, record in zip(ranks, from_many(ranked, 3, "row"), strict=False)]


def best_rows_in_words(run: Run) -> str:
    """Describe the control, and the choice of :func:`best_rows`."""
    ranked, said = rank_by(run, TABLE_METRIC), []
    if found := [r["control_cells"] for r in run.of_kind("image") if r.get("control_cells") is not None]:
        share = metric(sum(found) / len(found), TABLE_METRIC)
        of_rows = "of the cells of a row right (95 % of guesses, mean of the rows)."
        said.append(f"Without any update a guess has up to {share} {of_rows}")
    if len(from_many(ranked, 3, "row")) >= 2:
        source = "clients" if len({record["client"] for record in ranked}) > 1 else "uploads"
        most = f"The rows with the most cells reconstructed, from different {source}."
        said.append(f"Rows from different {source}: all reconstructed equally well." if _equal(ranked) else most)
    return " ".join(said)


def _equal(ranked: Sequence[Mapping[str, Any]]) -> bool:
    return len({record.get(TABLE_METRIC) for record in ranked}) == 1


def _view(record: Mapping[str, Any], found: Mapping[tuple[str, int], RowPair], rank: str = "") -> RowView:
    pair = found.get((record["id"], record["image"]), RowPair(None))
    original, control = pair.original, record.get("control_cells")
    without = [] if control is None else [f"without the update up to {metric(control, TABLE_METRIC)}"]
    lines = []
    for k, column in enumerate(pair.columns):
        cells = _cell(pair.guess, k, record), _cell(pair.adaptive, k, record)
        lines.append(RowLine(column, original[k] if original is not None else "?", *cells))
    told = described(record, "row", CAPTION, without)
    return RowView(**told, rank=rank, lines=lines, known=original is not None, adaptive=pair.adaptive is not None)


def _cell(guess: RowGuess | None, at: int, record: Mapping[str, Any]) -> RowCell | None:
    if guess is None:
        return None
    kind = "plain" if not guess.right else "right" if guess.right[at] else "wrong"
    proven = record.get("certainty") in ("proven", "consistent")
    return RowCell(guess.cells[at], kind, bool(proven) or guess.certain[at] >= SURE)
