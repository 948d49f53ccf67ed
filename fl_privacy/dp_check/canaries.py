"""What canaries that took part in one training show of its epsilon: a bound by guesses, and an estimate."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fl_privacy import checks
from fl_privacy.dp_check.bounds import best_one_run_epsilon, two_gaussians_epsilon
from fl_privacy.dp_check.claims import Claim, Unit
from fl_privacy.dp_check.mechanism import ACCUSATION, shown_epsilon


@dataclass(frozen=True, kw_only=True)
class CanaryTest:
    """One training with canaries, each of which took part with probability 1/2.

    Attributes:
        unit: what a canary is.
        taken: how many took part.
        left_out: how many did not.
        bound: largest epsilon that the guesses reject with ``confidence`` (Steinke, Nasr and Jagielski 2023).
        strict: as ``bound`` with the confidence with which a claim is called false.
        guesses: of how many canaries it was guessed whether they took part.
        right: of these.
        estimate: by two Gaussians (Andrew et al. 2023); ``None`` where too few canaries say how they spread.
        delta: of all of them.
        confidence: of the bound.
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
        """See ``bound``; the estimate is none."""
        return self.bound

    @property
    def number(self) -> int:
        """Count the canaries of the test."""
        return self.taken + self.left_out

    @property
    def showable(self) -> float:
        """Return the largest bound that this number of canaries can give, every guess being right."""
        there, absent = 1.0 + np.arange(self.taken), -1.0 - np.arange(self.left_out)
        return best_one_run_epsilon(there, absent, delta=self.delta, error=1 - self.confidence)[0]

    def contradicts(self, claim: Claim) -> bool:
        """Say whether the guesses reject the claim with the confidence with which claims are called false."""
        return self._is_of(claim) and self.strict > claim.epsilon

    def exceeds(self, claim: Claim) -> bool:
        """Say whether the bound, with its own lower confidence, lies above the claim."""
        return self._is_of(claim) and self.bound > claim.epsilon

    def _is_of(self, claim: Claim) -> bool:
        # What is private at a delta is so at a larger one, but not at a smaller one.
        return self.unit == claim.unit and self.delta >= claim.delta

    @property
    def in_words(self) -> str:
        """Describe the test in part of a sentence."""
        about = "" if self.estimate is None else f", about {shown_epsilon(self.estimate)} by an estimate"
        return (
            f"at least {shown_epsilon(self.bound)} by {self.number} canaries{about} (so many can show at most"
            f" {shown_epsilon(self.showable)})"
        )


def canary_test(
    taken: ArrayLike, left_out: ArrayLike, *, delta: float, unit: Unit, confidence: float = 0.95
) -> CanaryTest:
    """Bound and estimate epsilon by the scores of canaries that took part and of others that did not.

    Args:
        taken: (k,) scores, higher where a canary seems to have taken part.
        left_out: (m - k,) as ``taken``; each canary was left out with probability 1/2, on its own.
        delta: in (0, 1).
        unit: what a canary is.
        confidence: of the bound.
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
    """Estimate epsilon by the Gaussians that fit the scores with and without the canary (Andrew et al. 2023).

    Args:
        taken: (k,) scores of the canaries that took part.
        left_out: (m,) of those that did not.
        delta: in (0, 1).

    Returns:
        No bound: it may be too large as well as too small. ``None`` of fewer than ten scores on either side, or of one
        that is not finite.
    """
    there, absent = (np.asarray(scores, dtype=np.float64) for scores in (taken, left_out))
    if min(len(there), len(absent)) < 10 or not np.isfinite([*there, *absent]).all():
        return None
    if min(float(there.std()), float(absent.std())) <= MOST_SPREAD:
        return None
    return two_gaussians_epsilon(
        mean=float(there.mean() - absent.mean()),
        std=float(there.std(ddof=1)),
        std_without=float(absent.std(ddof=1)),
        delta=delta,
    )
