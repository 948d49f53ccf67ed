"""Metrics of reconstructed table rows: right cells, right rows, and their control."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.measure.intervals import BAND
from fl_privacy.measure.matching import Match, hard_labels, least_cost, matched, no_guess, order_of
from fl_privacy.types import Batch, Reconstruction
from fl_privacy.types.schema import TOLERANCE, Schema

_DRAWS, _ROWS_DRAWN = 20, 200  # least number of random draws for a control, and of rows in all of them
_BY_VALUE = 0.01  # weight of distances relative to wrong cells in the matching, to break ties


@dataclass(frozen=True, eq=False)
class WrittenRows:
    """Original and guessed rows as text, for the report, with right cells and the attacker's certainty."""

    columns: tuple[str, ...]
    originals: Sequence[Sequence[str] | None]  # cells of each original row; ``None`` if unknown
    guesses: Sequence[Sequence[str] | None]  # cells of each guess; ``None`` without a guess
    right: Tensor  # (B, C) booleans, true for right cells
    certain: Tensor  # (B, C) attacker's own certainty in [0, 1]


def right_cells(schema: Schema, guesses: Tensor, truths: Tensor) -> Tensor:
    """Return booleans (..., C), true for right cells: equal categories, and numbers within the tolerance."""
    return (guesses - truths).abs() <= schema.tolerances + 1e-9


def exact_rows(schema: Schema, guesses: Tensor, truths: Tensor) -> Tensor:
    """Return booleans (...), true for rows whose cells all equal the original's when rounded as in the table."""
    least = torch.tensor([0.5 * 10.0**-c.decimals if c.is_number else 0.0 for c in schema.columns])
    return ((guesses - truths).abs() <= least + 1e-6 * truths.abs()).all(-1)


def assign(schema: Schema, guesses: Tensor, truths: Tensor) -> Tensor:
    """Match guesses (G, C) to true rows (B, C) with fewest wrong cells; return each row's guess (B,), -1 for none."""
    return order_of((len(truths), len(guesses)), lambda: misfit(schema, guesses, truths), "rows")


def misfit(schema: Schema, guesses: Tensor, truths: Tensor) -> Tensor:
    """Return (B, G): wrong cells of guessed rows (G, C) for true rows (B, C), plus a distance below 0.01 for ties."""
    wrong = (~right_cells(schema, guesses[None], truths[:, None])).sum(-1).double()
    far = torch.cdist(schema.encode(truths).double(), schema.encode(guesses).double(), p=1)
    return wrong + _BY_VALUE * far / (1 + far)


def match_rows(reconstruction: Reconstruction, truth: Batch, schema: Schema) -> Match:
    """Match the guesses of ``reconstruction`` to the rows (B, F) of ``truth``, with as many right cells as possible."""
    originals, labels = truth.inputs.detach().cpu().float(), hard_labels(truth.labels.detach().cpu())
    failure, guess = no_guess(reconstruction), None
    if failure is None and reconstruction.batch is not None:
        found, width = reconstruction.batch.inputs, originals.shape[1]
        if found.dim() != 2 or found.shape[1] != width or not found.is_floating_point():
            failure = f"The guess is expected to be rows (B, {width}), but has {tuple(found.shape)} {found.dtype}."
        elif not bool(found.isfinite().all()):
            failure = "There is no guess with finite values."
        else:
            inputs = found.detach().cpu().float()
            guess = inputs, assign(schema, schema.cells(inputs), schema.cells(originals)), reconstruction.batch.labels
    return matched(originals, labels, guess, failure, missing="There is no guess for this row.")


def cells_right(right: Tensor, numbers: Tensor) -> Tensor:
    """Return the share (N,) float64 of right cells in each row of booleans ``right`` (N, C); ``numbers`` is unused."""
    return right.double().mean(1)


def categories_right(right: Tensor, numbers: Tensor) -> Tensor:
    """Return the share (N,) float64 of each row's categorical cells that are right; NaN for a row without any.

    ``right``, ``numbers``: booleans (N, C), true for right and for numeric cells.
    """
    return (right & ~numbers).sum(1).double() / (~numbers).sum(1)


def numbers_right(right: Tensor, numbers: Tensor) -> Tensor:
    """Return the share (N,) float64 of each row's numeric cells that are right, like :func:`categories_right`."""
    return (right & numbers).sum(1).double() / numbers.sum(1)


def row_right(right: Tensor, numbers: Tensor) -> Tensor:
    """Return (N,) float64: 1 for rows of booleans ``right`` (N, C) that are all true, else 0; ``numbers`` is unused."""
    return right.all(1).double()


def usual_row(public: Tensor, schema: Schema) -> Tensor:
    """Return a row (C,) with the most frequent category, or the median, of each column of ``public`` cells (M, C)."""
    found = public.median(0).values
    for place in (~schema.numbers).nonzero().flatten().tolist():
        found[place] = public[:, place].long().bincount().argmax().double()
    return found


def control_cells(public: Tensor, truths: Tensor, schema: Schema) -> Tensor:
    """Return the share (B,) float64 of each true row's cells that guesses without the update get right.

    It is the larger of two shares: that of :func:`usual_row`, and the quantile :data:`BAND` of those of random
    ``public`` rows (M, C), drawn many times and matched to ``truths`` (B, C) by :func:`assign`.
    """
    usual = right_cells(schema, usual_row(public, schema), truths).double().mean(1)
    rng = torch.Generator().manual_seed(0)
    draws = max(_DRAWS, -(-_ROWS_DRAWN // len(truths)))
    found = []
    for rows in torch.randint(len(public), (draws, len(truths)), generator=rng):
        guesses = public[rows]
        found.append(right_cells(schema, guesses[assign(schema, guesses, truths)], truths).double().mean(1))
    return torch.maximum(usual, torch.stack(found).quantile(BAND, dim=0, interpolation="higher"))


def written_rows(match: Match, reconstruction: Reconstruction, schema: Schema) -> WrittenRows:
    """Return the rows of ``match`` as text, with the certainty of each cell according to ``reconstruction``."""
    truths, guesses = schema.cells(match.originals), schema.cells(match.guesses)
    certain = torch.zeros_like(truths)
    if reconstruction.cells_certain is not None:
        found = match.found
        certain[found] = reconstruction.cells_certain.double()[match.order[found]]
    written = schema.written(guesses)
    return WrittenRows(
        columns=schema.names,
        originals=schema.written(truths),
        guesses=[own if at >= 0 else None for own, at in zip(written, match.order.tolist(), strict=True)],
        right=right_cells(schema, guesses, truths),
        certain=certain,
    )


BLOCK = 64  # number of rows that are compared with all guesses at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class PinnedRows:
    """Result of :func:`pinned_rows`: shares of cells and rows that are guessed right, and each true row's guess."""

    cells: float  # share of right cells, in the matching that maximizes it
    rows: float  # share of rows with all cells right, in the matching that maximizes it
    by_feature: np.ndarray  # (F,) share of right cells of each feature, as matched for ``cells``
    guess: np.ndarray  # (N,) index of a guess with all cells of the row right, as matched for ``rows``, -1 for none
    match: np.ndarray  # (N,) index of the guess matched to each row for ``cells``, -1 for none
    right: np.ndarray  # (N, F) booleans, true for right cells, as matched for ``cells``


def pinned_rows(truth: np.ndarray, guesses: np.ndarray, categories: Collection[int] = ()) -> PinnedRows:
    """Match guessed to true rows, and count right cells; ``UserError`` for wrong shapes or without scipy.

    Args:
        truth: rows (N, F) of numbers and category codes; NaN is an empty cell. Right numbers are within a tolerance in
            proportion to their column's standard deviation.
        guesses: rows (M, F) in any order; true rows without a guess count as wrong.
        categories: indices of the categorical features.
    """
    if truth.ndim != 2 or guesses.ndim != 2 or truth.shape[1:] != guesses.shape[1:] or not len(truth):
        raise UserError(
            f"truth and guesses are expected to be (N, F) and (M, F), but got {truth.shape} and {guesses.shape};"
            " reshape them."
        )
    number, features = truth.shape
    lacks = np.isnan(truth).all(0)
    allowed = np.where(lacks, 0.0, TOLERANCE * np.nanstd(np.where(lacks, 0.0, truth), axis=0))
    allowed[list(categories)] = 0.0
    right = np.empty((number, len(guesses)), dtype=np.int32)
    whole = np.empty((number, len(guesses)), dtype=bool)
    for first in range(0, number, BLOCK):
        same = _same(truth[first : first + BLOCK], guesses, allowed)
        right[first : first + BLOCK], whole[first : first + BLOCK] = same.sum(-1), same.all(-1)
    here, there = least_cost(-right, "rows")
    best_rows, best_guesses = least_cost(-whole.astype(np.int32), "rows")
    found = whole[best_rows, best_guesses]
    guess = np.full(number, -1)
    guess[best_rows[found]] = best_guesses[found]
    match, cells = np.full(number, -1), np.zeros((number, features), dtype=bool)
    match[here], cells[here] = there, _same(truth[here], guesses[there], allowed, paired=True)
    return PinnedRows(
        cells=float(cells.sum() / (number * features)),
        rows=float(found.sum() / number),
        by_feature=cells.sum(0) / number,
        guess=guess,
        match=match,
        right=cells,
    )


def _same(truth: np.ndarray, guesses: np.ndarray, allowed: np.ndarray, *, paired: bool = False) -> np.ndarray:
    left = truth if paired else truth[:, None]
    slack = allowed + 1e-6 * np.maximum(np.abs(left), 1e-3)
    return np.asarray((np.abs(left - guesses) <= slack) | (np.isnan(left) & np.isnan(guesses)))
