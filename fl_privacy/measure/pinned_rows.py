"""Score guesses at table rows, matched by optimal assignment: cells and whole rows within tolerance."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fl_privacy.errors import UserError

TOLERANCE = 0.319
"""Deviations of a feature within which a number counts as right (Vero et al., TabLeak, ICML 2023)."""

BLOCK = 64
"""Rows compared with all guesses at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PinnedRows:
    """Guesses assigned to the true rows.

    Attributes:
        cells: largest share of right cells over all matchings.
        rows: largest share of rows with all cells right.
        by_feature: (F,) shares of right cells, as matched for ``cells``.
        guess: (N,) guess matched to each row for ``rows``, -1 without a right one.
        match: (N,) guess matched to each row for ``cells``, -1 for none.
        right: (N, F) right cells, as matched for ``cells``.
    """

    cells: float
    rows: float
    by_feature: np.ndarray
    guess: np.ndarray
    match: np.ndarray
    right: np.ndarray


def pinned_rows(
    truth: np.ndarray, guesses: np.ndarray, categories: Collection[int] = (), *, tolerance: float = TOLERANCE
) -> PinnedRows:
    """Assign guesses to the true rows, and count the right cells.

    Args:
        truth: (N, F) numbers and codes of categories, NaN for none; its deviations scale the tolerance.
        guesses: (M, F) in any order; rows without a guess count as wrong.
        tolerance: deviations of a feature.
        categories: features that must be equal.

    Raises:
        UserError: shapes do not fit, or scipy is not installed.
    """
    try:
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415
    except ImportError as error:
        raise UserError("Matching rows needs scipy, which is not installed; run `pip install scipy`.") from error
    if truth.ndim != 2 or guesses.ndim != 2 or truth.shape[1:] != guesses.shape[1:] or not len(truth):
        raise UserError(f"Rows and guesses are expected as (N, F) and (M, F), but got {truth.shape}, {guesses.shape}.")
    number, features = truth.shape
    lacks = np.isnan(truth).all(0)
    allowed = np.where(lacks, 0.0, tolerance * np.nanstd(np.where(lacks, 0.0, truth), axis=0))
    allowed[list(categories)] = 0.0
    right = np.empty((number, len(guesses)), dtype=np.int32)
    whole = np.empty((number, len(guesses)), dtype=bool)
    for first in range(0, number, BLOCK):
        same = _same(truth[first : first + BLOCK], guesses, allowed)
        right[first : first + BLOCK], whole[first : first + BLOCK] = same.sum(-1), same.all(-1)
    here, there = linear_sum_assignment(right, maximize=True)
    matched = _same(truth[here], guesses[there], allowed, paired=True)
    best_rows, best_guesses = linear_sum_assignment(whole, maximize=True)
    found = whole[best_rows, best_guesses]
    guess = np.full(number, -1)
    guess[best_rows[found]] = best_guesses[found]
    match, cells = np.full(number, -1), np.zeros((number, features), dtype=bool)
    match[here], cells[here] = there, matched
    return PinnedRows(
        cells=float(matched.sum() / (number * features)),
        rows=float(found.sum() / number),
        by_feature=matched.sum(0) / number,
        guess=guess,
        match=match,
        right=cells,
    )


def _same(truth: np.ndarray, guesses: np.ndarray, allowed: np.ndarray, *, paired: bool = False) -> np.ndarray:
    """Mark cells within ``allowed``, (N, M, F), or (N, F) if paired; NaN equals NaN."""
    left = truth if paired else truth[:, None]
    slack = allowed + 1e-6 * np.maximum(np.abs(left), 1e-3)
    return np.asarray((np.abs(left - guesses) <= slack) | (np.isnan(left) & np.isnan(guesses)))
