"""Show the attacked rows of a table: original next to guess, certain cells in bold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_privacy.measure.registry import TABLE_METRIC
from fl_privacy.report.gallery import SHOWN, certainty_of, from_many, place_of, rank_by, whose_label
from fl_privacy.report.numbers import metric, title
from fl_privacy.runs.folder import Run
from fl_privacy.runs.folder.row_files import RowGuess, RowPair

CAPTION = ("cells_right", "categories_right", "numbers_right")

SURE = 0.9
"""Least certainty of a cell shown as certain."""

_RANKS = ("Read best", "Second", "Third")


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
class RowView:
    """One attacked row.

    Attributes:
        rank: rank of the three best, or empty.
    """

    rank: str = ""
    where: str
    figures: str
    label: str
    failure: str | None
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
    ranked = rank_by(run, TABLE_METRIC)
    return " ".join(filter(None, [_control_in_words(run), _which(ranked)]))


def _control_in_words(run: Run) -> str:
    found = [record["control_cells"] for record in run.of_kind("image") if record.get("control_cells") is not None]
    if not found:
        return ""
    return (
        f"Without any update a guess has up to {metric(sum(found) / len(found), TABLE_METRIC)} of the cells of a row"
        " right (95 % of guesses, mean of the rows)."
    )


def _which(ranked: Sequence[Mapping[str, Any]]) -> str:
    if len(from_many(ranked, 3, "row")) < 2:
        return ""
    source = "clients" if len({record["client"] for record in ranked}) > 1 else "uploads"
    if _equal(ranked):
        return f"Rows of different {source}: all were read equally well."
    return f"The rows of which most cells were read, of different {source}."


def _equal(ranked: Sequence[Mapping[str, Any]]) -> bool:
    return len({record.get(TABLE_METRIC) for record in ranked}) == 1


def _view(record: Mapping[str, Any], found: Mapping[tuple[str, int], RowPair], rank: str = "") -> RowView:
    pair = found.get((record["id"], record["image"]), RowPair((), None))
    failed, original = record.get("failure"), pair.original
    figures = [
        f"{title(name)} {metric(record[name], name)}".replace(" ", "\u00a0")
        for name in CAPTION
        if record.get(name) is not None
    ]
    if record.get("control_cells") is not None:
        without = f"without the update up to {metric(record['control_cells'], TABLE_METRIC)}"
        figures.append(without.replace(" ", "\u00a0"))
    said = [whose_label(record), certainty_of(record), record["member"]]
    return RowView(
        rank=rank,
        where=f"Round {record['round']}, {place_of(record, 'row')}",
        figures=" · ".join(figures),
        label="" if failed else ", ".join(filter(None, said)),
        failure=failed,
        lines=[
            RowLine(
                column=column,
                original=original[k] if original is not None else "?",
                guess=_cell(pair.guess, k, record),
                adaptive=_cell(pair.adaptive, k, record),
            )
            for k, column in enumerate(pair.columns)
        ],
        known=original is not None,
        adaptive=pair.adaptive is not None,
    )


def _cell(guess: RowGuess | None, at: int, record: Mapping[str, Any]) -> RowCell | None:
    if guess is None:
        return None
    kind = "plain" if not guess.right else "right" if guess.right[at] else "wrong"
    proven = record.get("certainty") in ("proven", "consistent")
    return RowCell(guess.cells[at], kind, bool(proven) or guess.certain[at] >= SURE)
