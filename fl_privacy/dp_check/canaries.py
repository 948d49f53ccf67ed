"""Bounds and estimates of epsilon from canaries in one training."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fl_privacy import checks
from fl_privacy.dp_check.bounds import best_one_run_epsilon, two_gaussians_epsilon
from fl_privacy.dp_check.claims import Claim, Unit
from fl_privacy.dp_check.mechanism import ACCUSATION, shown_epsilon


@dataclass(frozen=True, kw_only=True)
class CanaryTest:
    """One training with canaries, each of which participated with probability 1/2.

    Attributes:
        bound: largest epsilon that the guesses reject with ``confidence`` (Steinke, Nasr and Jagielski 2023).
        strict: same bound with the confidence for calling a claim false.
        estimate: epsilon by two Gaussians (Andrew et al. 2023); ``None`` with too few canaries.
    """

    unit: Unit
    taken: int
    left_out: int
    bound: float
    strict: float
    guesses: int
    right: int
    estimate: float | None
    delta: float
    confidence: float = 0.95

    @property
    def lower_bound(self) -> float:
        return self.bound

    @property
    def number(self) -> int:
        return self.taken + self.left_out

    @property
    def showable(self) -> float:
        """Return the largest bound that this number of canaries can give, with all guesses right."""
        there, absent = 1.0 + np.arange(self.taken), -1.0 - np.arange(self.left_out)
        return best_one_run_epsilon(there, absent, delta=self.delta, error=1 - self.confidence)[0]

    def contradicts(self, claim: Claim) -> bool:
        """Return ``True`` if the guesses reject the claim with the confidence for calling claims false."""
        return self._is_of(claim) and self.strict > claim.epsilon

    def exceeds(self, claim: Claim) -> bool:
        """Return ``True`` if the bound, with its own lower confidence, lies above the claim."""
        return self._is_of(claim) and self.bound > claim.epsilon

    def _is_of(self, claim: Claim) -> bool:
        # Privacy at a delta implies privacy at a larger one, but not at a smaller one.
        return self.unit == claim.unit and self.delta >= claim.delta

    @property
    def in_words(self) -> str:
        about = "" if self.estimate is None else f", about {shown_epsilon(self.estimate)} by an estimate"
        return (
            f"at least {shown_epsilon(self.bound)} by {self.number} canaries{about} (so many can show at most"
            f" {shown_epsilon(self.showable)})"
        )


def canary_test(
    taken: ArrayLike, left_out: ArrayLike, *, delta: float, unit: Unit, confidence: float = 0.95
) -> CanaryTest:
    """Bound and estimate epsilon from the scores of canaries.

    Args:
        taken: (k,) scores of participants, higher if participation seems likelier.
        left_out: (m - k,) scores of canaries left out, each independently with probability 1/2.
        delta: probability in (0, 1).
    """
    checks.number("delta", delta, above=0, below=1, example=1e-5)
    there, absent = (np.asarray(scores, dtype=np.float64) for scores in (taken, left_out))
    bound, guesses, right = best_one_run_epsilon(there, absent, delta=delta, error=1 - confidence)
    strict, _, _ = best_one_run_epsilon(there, absent, delta=delta, error=1 - ACCUSATION)
    return CanaryTest(
        unit=unit,
        taken=len(there),
        left_out=len(absent),
        bound=bound,
        strict=strict,
        guesses=guesses,
        right=right,
        estimate=estimated_epsilon(there, absent, delta=delta),
        delta=delta,
        confidence=confidence,
    )


MOST_SPREAD = 1e-12
"""Standard deviation of scores below which no Gaussian is fitted."""


def estimated_epsilon(taken: ArrayLike, left_out: ArrayLike, *, delta: float) -> float | None:
    """Estimate epsilon by Gaussians fitted to the scores with (k,) and without (m,) the canary (Andrew et al. 2023).

    It is no bound. Return ``None`` with fewer than ten scores on either side, or one not finite.
    """
    there, absent = (np.asarray(scores, dtype=np.float64) for scores in (taken, left_out))
    if min(len(there), len(absent)) < 10 or not np.isfinite([*there, *absent]).all():
        return None
    if min(float(there.std()), float(absent.std())) <= MOST_SPREAD:
        return None
    mean, stds = float(there.mean() - absent.mean()), (float(there.std(ddof=1)), float(absent.std(ddof=1)))
    return two_gaussians_epsilon(mean=mean, std=stds[0], std_without=stds[1], delta=delta)
