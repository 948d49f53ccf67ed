"""Lower bounds on epsilon, and estimates, from canaries in one training."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy  # its parts are imported when used: statistics alone take as long as PyTorch
from numpy.typing import ArrayLike, NDArray

from fl_privacy import checks
from fl_privacy.dp_check import bounds
from fl_privacy.dp_check.claims import Claim, Unit
from fl_privacy.dp_check.mechanism import ACCUSATION, shown_epsilon


@dataclass(frozen=True, kw_only=True)
class CanaryTest:
    """Result of a training with canaries, each of which participated with probability 1/2.

    Attributes:
        bound: lower bound on epsilon with ``confidence``, for scores of any distribution.
        strict: lower bound with the higher confidence (``ACCUSATION``) that is needed to call a claim false.
        estimate: estimate of epsilon by two Gaussians fitted to the scores; ``None`` for too few canaries.
        estimate_least: lower limit of the estimate with ``confidence``; ``None`` if the scores do not look like two
            Gaussians of equal variance.
        doubt: reason why ``estimate_least`` is ``None``, or empty.
        noise: ``gaussian`` if both bounds assume Gaussian noise (Mahloujifar, Melis and
            Chaudhuri 2025), ``other`` if they assume nothing (Steinke, Nasr and Jagielski 2023).
    """

    unit: Unit
    taken: int  # number of canaries that participated
    left_out: int  # number of the others
    bound: float
    strict: float
    guesses: int  # number of guesses about participation
    right: int  # number of right ones
    estimate: float | None
    estimate_least: float | None
    doubt: str
    delta: float
    noise: Literal["gaussian", "other"]
    confidence: float = 0.95

    @property
    def lower_bound(self) -> float:
        return self.bound

    @property
    def number(self) -> int:
        return self.taken + self.left_out

    @property
    def showable(self) -> float:
        """Return the largest bound that so many canaries can show, which needs all guesses right."""
        there, absent = 1.0 + np.arange(self.taken), -1.0 - np.arange(self.left_out)
        return BOUNDS[self.noise](there, absent, delta=self.delta, error=1 - self.confidence)[0]

    def contradicts(self, claim: Claim) -> bool:
        return self._is_of(claim) and self.strict > claim.epsilon

    def exceeds(self, claim: Claim) -> bool:
        return self._is_of(claim) and max(self.bound, self.estimate_least or 0.0) > claim.epsilon

    def _is_of(self, claim: Claim) -> bool:
        # Privacy at a delta implies privacy at a larger one, but not at a smaller one.
        return self.unit == claim.unit and self.delta >= claim.delta

    @property
    def in_words(self) -> str:
        shape = "Gaussian noise and any scores" if self.noise == "gaussian" else "noise of any shape"
        about = "" if self.estimate is None else f"; about {shown_epsilon(self.estimate)} by an estimate"
        if self.estimate_least is not None:
            about += f" ({shown_epsilon(self.estimate_least)} or more if the scores are Gaussian, as they look)"
        elif about:
            about += f" without limits, since {self.doubt}"
        return (
            f"at least {shown_epsilon(self.bound)} by {self.number} canaries (for {shape}; so many can show at most"
            f" {shown_epsilon(self.showable)}){about}"
        )


BOUNDS: Mapping[str, Callable[..., tuple[float, int, int]]] = {
    "gaussian": bounds.one_run_gaussian_epsilon,
    "other": bounds.best_one_run_epsilon,
}
"""Shape of the noise -> function that computes the bound from the canaries' scores."""


def canary_test(
    taken: ArrayLike,
    left_out: ArrayLike,
    *,
    delta: float,
    unit: Unit,
    noise: Literal["gaussian", "other"] = "gaussian",
    confidence: float = 0.95,
) -> CanaryTest:
    """Return lower bounds on epsilon, and an estimate, from the scores of canaries (made-up examples or clients).

    Args:
        taken: scores (k,) of the canaries that took part, higher if participation looks likelier.
        left_out: scores (m - k,) of the other canaries; each was left out with probability 1/2.
        delta: probability in (0, 1).
        unit: example or client, which a canary stands for.
        noise: ``gaussian`` if the claim assumes Gaussian noise, ``other`` to assume nothing. Scores that do not look
            Gaussian count as ``other``.
        confidence: confidence in (0, 1) of each lower bound, and of the estimate's lower limit.
    """
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    checks.one_of("noise", noise, tuple(BOUNDS))
    there, absent = (np.asarray(scores, dtype=np.float64) for scores in (taken, left_out))
    estimate, least, doubt = _estimated(there, absent, delta=delta, error=1 - confidence)
    if doubt == NOT_GAUSSIAN:
        noise = "other"
    bound, guesses, right = BOUNDS[noise](there, absent, delta=delta, error=1 - confidence)
    return CanaryTest(
        unit=unit,
        taken=len(there),
        left_out=len(absent),
        bound=bound,
        strict=BOUNDS[noise](there, absent, delta=delta, error=1 - ACCUSATION)[0],
        guesses=guesses,
        right=right,
        estimate=estimate,
        estimate_least=least,
        doubt=doubt,
        delta=delta,
        noise=noise,
        confidence=confidence,
    )


FEWEST = 10  # least number of scores on either side for an estimate
MOST_SPREAD = 1e-12  # standard deviation of scores below which no Gaussian is fitted

NOT_GAUSSIAN = "the scores do not look Gaussian"
UNEQUAL = "the scores of participants vary differently from the others'"


def _estimated(
    there: NDArray[np.float64], absent: NDArray[np.float64], *, delta: float, error: float
) -> tuple[float | None, float | None, str]:
    """Return an estimate of epsilon, its lower limit or ``None``, and why there is no limit (Agrawal et al. 2026)."""
    if doubt := _doubt(there, absent):
        return estimated_epsilon(there, absent, delta=delta), None, doubt
    variances = float(there.var(ddof=1)), float(absent.var(ddof=1))
    shift = float(there.mean() - absent.mean())
    degrees = len(there) + len(absent) - 2
    pooled = math.sqrt(((len(there) - 1) * variances[0] + (len(absent) - 1) * variances[1]) / degrees)
    if shift <= 0:
        return 0.0, 0.0, ""
    least = bounds.measured_mu(there, absent, error=error)
    return bounds.gaussian_epsilon(shift / pooled, delta), bounds.gaussian_epsilon(least, delta), ""


def _doubt(there: NDArray[np.float64], absent: NDArray[np.float64]) -> str:
    if min(len(there), len(absent)) < FEWEST or not np.isfinite([*there, *absent]).all():
        return "there are too few scores, or they are not finite"
    if not bounds.look_gaussian(there, absent):
        return NOT_GAUSSIAN
    larger = float(scipy.stats.f.sf(there.var(ddof=1) / absent.var(ddof=1), len(there) - 1, len(absent) - 1))
    return UNEQUAL if min(larger, 1 - larger) < 5e-4 else ""


def estimated_epsilon(taken: ArrayLike, left_out: ArrayLike, *, delta: float) -> float | None:
    """Return an estimate of epsilon, which is no bound, from Gaussians fitted to the scores (Andrew et al. 2023).

    ``taken``, ``left_out``: scores of canaries that took part or did not. ``None`` if either are too few, constant or
    infinite.
    """
    there, absent = (np.asarray(scores, dtype=np.float64) for scores in (taken, left_out))
    if min(len(there), len(absent)) < FEWEST or not np.isfinite([*there, *absent]).all():
        return None
    if min(float(there.std()), float(absent.std())) <= MOST_SPREAD:
        return None
    mean, stds = float(there.mean() - absent.mean()), (float(there.std(ddof=1)), float(absent.std(ddof=1)))
    return bounds.two_gaussians_epsilon(mean=mean, std=stds[0], std_without=stds[1], delta=delta)
