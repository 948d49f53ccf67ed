"""Infer rows added or removed between two rounds, from a GaussianNB's counts, means and variances.

For n rows of mean m and population variance v, the sum is n m and the sum of squares n (v + m^2).
"""

from dataclasses import dataclass

import numpy as np

from fl_privacy.errors import UserError

ROUNDING = 1e-6  # largest residual of an equation, as a share of its largest term
MOST_UNCOUNTED = 1_000_000  # largest number of rows of a class without counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Means, variances and, if sent, counts of K classes and F features, as in a fitted GaussianNB."""

    means: np.ndarray  # (K, F), ``theta_``
    variances: np.ndarray  # (K, F), ``var_``: variances plus ``smoothing``
    counts: np.ndarray | None = None  # (K,) numbers of rows, if sent
    smoothing: float = 0.0  # ``epsilon_`` of scikit-learn

    def __post_init__(self) -> None:
        if self.means.ndim != 2 or self.means.shape != self.variances.shape:
            raise UserError(
                f"Means, variances (K, F) are expected, but got {self.means.shape}, {self.variances.shape};"
                " pass theta_ and var_ of one model."
            )
        if self.counts is not None and self.counts.shape != self.means.shape[:1]:
            raise UserError(
                f"Counts of {len(self.means)} classes are expected, but got {self.counts.shape}; pass class_count_."
            )
        given = (self.means, self.variances, *([] if self.counts is None else [self.counts]))
        if not all(np.isfinite(values).all() for values in given):
            raise UserError("Finite means, variances and counts are expected, but some are not; fit the model again.")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsBetween:
    """The rows that one class gained or lost between two rounds.

    ``rows`` has F features, and its shape depends on ``change``, the rows gained minus the rows lost:

    - 1 or -1: the row, (1, F).
    - 2 or -2: each feature's smaller value, then its larger one, (2, F).
    - 0: the row that was lost, then the one gained, if one was exchanged, (2, F); NaN for equal values.
    - otherwise: empty.
    """

    label: int
    change: int  # number of rows that came, negative if they went; 0 if as many came as went
    before: int  # rows of the class before
    rows: np.ndarray
    mean: np.ndarray  # (F,) of the rows that came or went, exact for any number
    deviation: np.ndarray  # (F,) of these rows


def rows_between(before: Moments, after: Moments) -> tuple[RowsBetween, ...]:
    """Return the rows that were added or removed between two rounds of one client, for each class that changed.

    Without counts, only changes by one row are found. ``UserError`` if the rounds differ in classes or features.
    """
    if before.means.shape != after.means.shape:
        raise UserError(
            f"Rounds of one model are expected, but the means are {before.means.shape} and {after.means.shape};"
            " compare rounds with the same classes and features."
        )
    found = []
    for label in range(len(before.means)):
        same = np.array_equal(before.means[label], after.means[label])
        counted = before.counts is not None and after.counts is not None
        if same and not (counted and before.counts[label] != after.counts[label]):  # type: ignore[index]
            continue
        one = _counted(before, after, label) if counted else _uncounted(before, after, label)
        if one is not None:
            found.append(one)
    return tuple(found)


def rows_alone(moments: Moments) -> tuple[tuple[int, np.ndarray], ...]:
    """Return (class, row) for each class with a single row; the row is the class's mean.

    If counts are unknown, a class counts as one if its variance is only the smoothing or nearly 0.
    """
    if moments.counts is not None:
        alone = moments.counts == 1
    else:
        alone = moments.variances.max(1) <= (moments.smoothing * (1 + ROUNDING) or ROUNDING * moments.variances.max())
    return tuple((int(label), moments.means[label]) for label in np.flatnonzero(alone))


def _squares(moments: Moments, label: int) -> np.ndarray:
    return np.asarray(moments.variances[label] - moments.smoothing + moments.means[label] ** 2)


def _counted(before: Moments, after: Moments, label: int) -> RowsBetween | None:
    assert before.counts is not None and after.counts is not None
    n, m = float(before.counts[label]), float(after.counts[label])
    change = round(m - n)
    if not change:
        step = n * (after.means[label] - before.means[label])
        lift = n * (_squares(after, label) - _squares(before, label))
        moved = np.abs(step) > 1e-12 * n * np.maximum(np.abs(after.means[label]), 1e-300)
        sums = np.divide(lift, step, out=np.full(len(step), np.nan), where=moved)
        rows, deviation = np.stack([sums - step, sums + step]) / 2, np.abs(step) / 2
        return RowsBetween(label=label, change=0, before=round(n), rows=rows, mean=rows.mean(0), deviation=deviation)
    mean = (m * after.means[label] - n * before.means[label]) / change
    square = (m * _squares(after, label) - n * _squares(before, label)) / change
    deviation = np.sqrt(np.maximum(square - mean**2, 0.0))
    rows = np.empty((0, len(mean)))
    if abs(change) == 1:
        rows = mean[None]
    elif abs(change) == 2:
        rows = np.stack([mean - deviation, mean + deviation])
    return RowsBetween(label=label, change=change, before=round(n), rows=rows, mean=mean, deviation=deviation)


def _uncounted(before: Moments, after: Moments, label: int) -> RowsBetween | None:
    """Find the one added or removed row of class ``label`` without class counts; ``None`` if no count fits."""
    options = []
    for change, (old, new) in ((1, (before, after)), (-1, (after, before))):
        step = new.means[label] - old.means[label]
        lift = _squares(new, label) - _squares(old, label)
        moved = np.abs(step) > 1e-12 * np.maximum(np.abs(new.means[label]), 1e-300)
        if not moved.any():
            continue
        # x = m' + n step and x^2 = q' + n lift, one quadratic equation in n for each feature
        a, b = step[moved] ** 2, 2 * new.means[label][moved] * step[moved] - lift[moved]
        c = new.means[label][moved] ** 2 - _squares(new, label)[moved]
        root = np.sqrt(np.maximum(b**2 - 4 * a * c, 0.0))
        best = int(np.argmax(a / np.maximum(c**2, 1e-300)))
        numbers = ((-b[best] + sign * root[best]) / (2 * a[best]) for sign in (1, -1))
        for whole in (round(number) for number in numbers if 0.5 <= number <= MOST_UNCOUNTED):
            left = a * whole**2 + b * whole + c
            scale = a * whole**2 + np.abs(b) * whole + np.abs(c) + 1e-300
            options.append((float(np.max(np.abs(left) / scale)), change, whole, new.means[label] + whole * step))
    apart, change, number, row = min(options, key=lambda one: one[0], default=(np.inf, 0, 0, np.empty(0)))
    if apart > ROUNDING:
        return None
    none, number = np.zeros(len(row)), number if change > 0 else number + 1
    return RowsBetween(label=label, change=change, before=number, rows=row[None], mean=row, deviation=none)
