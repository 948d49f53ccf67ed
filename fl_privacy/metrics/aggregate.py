"""From many values to what a table shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A sample in numbers.

    Attributes:
        mean: arithmetic mean.
        ci95: 95 % confidence interval of the mean by Student's t; ``None`` for a single or an infinite value.
        n: size of the sample.
        median: the middle.
        min: the smallest.
        max: the largest.
    """

    mean: float
    ci95: tuple[float, float] | None
    n: int
    median: float
    min: float
    max: float


def aggregate(values: Sequence[float]) -> Statistic | None:
    """The statistic of ``values``, NaN left out; ``None`` where nothing is left.

    Raises:
        UserError: scipy is not installed.
    """
    sample = np.asarray(values, dtype=np.float64)
    sample = sample[~np.isnan(sample)]
    if not sample.size:
        return None
    mean = float(sample.mean())
    return Statistic(
        mean=mean,
        ci95=_interval(sample, mean),
        n=int(sample.size),
        median=float(np.median(sample)),
        min=float(sample.min()),
        max=float(sample.max()),
    )


def pmm(accuracy: float, undefended_accuracy: float) -> float:
    """Performance maintenance metric of Refiner: accuracy in percent of what the same training reaches undefended."""
    return 100 * accuracy / undefended_accuracy if undefended_accuracy > 0 else math.nan


def _interval(sample: np.ndarray, mean: float) -> tuple[float, float] | None:
    if sample.size < 2 or not math.isfinite(mean):
        return None
    try:
        from scipy.special import stdtrit  # noqa: PLC0415
    except ImportError as error:
        raise UserError("Intervals need scipy, which is not installed; run `pip install scipy`.") from error
    half = float(stdtrit(sample.size - 1, 0.975) * sample.std(ddof=1) / math.sqrt(sample.size))
    return mean - half, mean + half
