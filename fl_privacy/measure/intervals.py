"""Statistics with confidence intervals."""

import importlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from fl_privacy.errors import UserError

ANY_VALUE = (-math.inf, math.inf)
FEW = 5  # with fewer independent groups an interval says little: Student's factor is 2.8 with five and 12.7 with two


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """Statistics of a sample.

    Attributes:
        ci95: 95 % confidence interval of the mean within the range of the values; ``None`` for a single group, an
            infinite value, or a split sample (``is_split``), for which the median says more.
        groups: number of independent groups.
    """

    mean: float
    ci95: tuple[float, float] | None
    n: int
    groups: int
    median: float
    min: float
    max: float


def aggregate(
    values: Sequence[float], *, groups: Sequence[Hashable] | None = None, within: tuple[float, float] = ANY_VALUE
) -> Statistic | None:
    """Compute the statistic of ``values`` without NaN; return ``None`` if nothing is left.

    The interval is Student's t, with groups the cluster-robust CR2 interval of Bell and McCaffrey 2002 ("Bias reduction
    in standard errors for linear regression with multi-stage samples"), since images of one upload are not independent.
    For G groups of n_g among n values, the variance of the mean is the sum of the groups' squared sums of deviations
    over n (n - n_g), with Satterthwaite's degrees of freedom, at most G - 1.

    Args:
        groups: group of each value; ``None`` if all are independent.
        within: range of the values, to which the interval is cut.

    >>> found = aggregate([10.0, 12.0, 14.0, 16.0], groups=["a", "a", "b", "b"])
    >>> found.mean, found.n, found.groups
    (13.0, 4, 2)
    """
    sample = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(sample)
    if not known.any():
        return None
    numbers: dict[Hashable, int] = {}
    numbered = range(sample.size) if groups is None else [numbers.setdefault(one, len(numbers)) for one in groups]
    labels = np.asarray(numbered, dtype=np.int64)
    sample, labels = sample[known], np.unique(labels[known], return_inverse=True)[1]
    mean = float(sample.mean())
    return Statistic(
        mean=mean,
        ci95=_interval(sample, labels, mean, within),
        n=int(sample.size),
        groups=int(labels.max()) + 1,
        median=float(np.median(sample)),
        min=float(sample.min()),
        max=float(sample.max()),
    )


FAR = 0.6  # least share of the range spanned by the gap that splits a sample
LEAST_SPLIT = 8
"""Least number of independent groups of a split sample; evenly spread samples of fewer have such a gap, too."""


def is_split(values: Sequence[float], *, groups: int) -> bool:
    """Return ``True`` if a few values are far from all others, such as a few exact guesses among bad ones.

    The interval of the mean then covers too little. Samples of zeros and ones are not split.

    >>> is_split([11.0, 9.0, 12.0, 10.0, 13.0, 8.0, 9.5, 100.0], groups=8)
    True
    """
    known = np.sort([value for value in values if not math.isnan(value)])
    if groups < LEAST_SPLIT or len(known) < LEAST_SPLIT or set(known.tolist()) <= {0.0, 1.0}:
        return False
    if math.isinf(known[-1]) or math.isinf(known[0]):
        return bool(np.isinf(known).sum() <= len(known) / 3)
    gaps = np.diff(known)
    place = int(gaps.argmax()) + 1
    return bool(gaps.max() > FAR * (known[-1] - known[0]) and min(place, len(known) - place) <= len(known) / 3)


def pmm(accuracy: float, undefended_accuracy: float) -> float:
    """Compute Refiner's performance maintenance metric: accuracy in percent of the undefended training's.

    >>> pmm(0.45, 0.5)
    90.0
    """
    return 100 * accuracy / undefended_accuracy if undefended_accuracy > 0 else math.nan


def share_at_most(count: int, n: int, *, groups: int | None = None) -> float:
    """Return the 95 % upper end of a share of which ``count`` of ``n`` were seen (Clopper and Pearson 1934).

    If fewer than ``n``, the independent ``groups`` are the sample size, and the count is rounded up.

    >>> round(share_at_most(0, 100), 3)  # none of a hundred
    0.03
    """
    number = n if groups is None else min(n, groups)
    seen = math.ceil(count * number / n)
    return 1.0 if seen >= number else float(_special().betaincinv(seen + 1, number - seen, 0.95))


def binomial_tail(count: int, n: int, share: float) -> float:
    """Return the probability of at least ``count`` of ``n`` events, each with probability ``share``, also if tiny.

    >>> round(binomial_tail(1, 10, 1 / 1001), 4)
    0.0099
    >>> f"{binomial_tail(6, 6, 0.001):.3g}"
    '1e-18'
    """
    if count <= 0:
        return 1.0
    return 0.0 if count > n or share <= 0 else float(_special().betainc(count, n - count + 1, min(share, 1.0)))


def poisson_tail(count: int, mean: float) -> float:
    """Return the probability of at least ``count`` rare events if ``mean`` are expected.

    >>> round(poisson_tail(1, 0.01), 4)
    0.01
    """
    return 1.0 if count <= 0 else float(_special().gammainc(count, mean))


def share_interval(count: int, n: int, *, groups: int | None = None) -> tuple[float, float]:
    """Return the 95 % interval of a share of which ``count`` of ``n`` were seen (Clopper and Pearson 1934).

    If fewer than ``n``, the independent ``groups`` are the sample size, and the count is rounded down for the lower end
    and up for the upper one.

    >>> [round(end, 2) for end in share_interval(0, 4)]
    [0.0, 0.6]
    """
    number = n if groups is None else min(n, groups)
    low, high = (np.asarray([edge(count * number / n)]) for edge in (math.floor, math.ceil))
    return float(binomial_lower(low, number, 0.025)[0]), float(binomial_upper(high, number, 0.025)[0])


def binomial_lower(counts: np.ndarray, n: int, error: float) -> np.ndarray:
    """Return lower ends of shares of which ``counts`` of ``n`` were seen, each wrong with probability ``error``."""
    return np.where(counts > 0, _special().betaincinv(np.maximum(counts, 1), n - counts + 1, error), 0.0)


def binomial_upper(counts: np.ndarray, n: int, error: float) -> np.ndarray:
    """Return upper ends of shares of which ``counts`` of ``n`` were seen, each wrong with probability ``error``."""
    return np.where(counts < n, _special().betaincinv(counts + 1, np.maximum(n - counts, 1), 1 - error), 1.0)


def _interval(
    sample: np.ndarray, labels: np.ndarray, mean: float, within: tuple[float, float]
) -> tuple[float, float] | None:
    sizes = np.bincount(labels).astype(float)
    if len(sizes) < 2 or not math.isfinite(mean):
        return None
    weights = 1 / (sample.size * np.sqrt(1 - sizes / sample.size))
    variance = float(np.square(weights * np.bincount(labels, weights=sample - mean)).sum())
    # covariance of the groups' weighted sums for independent values: G = diag(a) - b b', by its traces
    alone, together = weights**2 * sizes, weights * sizes / math.sqrt(sample.size)
    trace = alone.sum() - np.square(together).sum()
    squared = np.square(alone).sum() - 2 * (alone * together**2).sum() + np.square(together).sum() ** 2
    half = float(_special().stdtrit(trace**2 / squared, 0.975)) * math.sqrt(variance)
    return max(mean - half, within[0]), min(mean + half, within[1])


def _special() -> ModuleType:
    try:
        return importlib.import_module("scipy.special")
    except ImportError as error:
        raise UserError("Intervals need scipy, which is not installed; run `pip install scipy`.") from error


GREEN_BELOW, RED_ABOVE = 1.0, 40.0
"""Ratios ||B|| / ||E|| between the regions of a curve. Green: the perturbation exceeds the gradient, reconstruction
is expected to fail (Theorem 2.2). Red, roughly from where Figure 5 puts it: so small that images are restored."""


@dataclass(frozen=True, kw_only=True)
class PpcPoint:
    """A mechanism at one control value: accuracy in [0, 1], distance of guesses from the truth, and ||B|| / ||E||."""

    accuracy: float
    distance: float
    signal_to_distortion: float

    @property
    def calibrated(self) -> float:
        """Return Acc * dist (SPN, Definition 1)."""
        return self.accuracy * self.distance

    @property
    def abscissa(self) -> float:
        """Return log10(||B|| / ||E|| + 1), the horizontal axis of a PPC curve; infinite for an infinite ratio."""
        return math.log10(self.signal_to_distortion + 1)


def cap(points: Sequence[PpcPoint]) -> float:
    """Compute CAP, the mean of Acc * dist over at least one point (SPN, Eq. 1); higher is better."""
    if not points:
        raise UserError("CAP is expected to be of at least one point of a mechanism, but there are none.")
    return sum(point.calibrated for point in points) / len(points)
