"""Facts of a mechanism that disagree with its claim, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.dp_check.bounds import gaussian_mu
from fl_privacy.dp_check.claims import Claim
from fl_privacy.dp_check.draws import Pilot
from fl_privacy.dp_check.structure import Uncovered

MOST_UNCHANGED = 0.5
"""Mean number of unchanged values of a release above which this is named as a reason."""

BEYOND = 1.1
"""Factor by which a measured norm must exceed the claimed one to be named as a reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Measurements on the most distinguished pair of neighbors.

    Attributes:
        clip_norm: stated clipping norm (l2) of one unit's contribution, if any.
        moved: distance of the release's means in the most distinguishing direction.
        noise_std: standard deviation of the noise in that direction.
        unchanged: mean number of the first neighbor's values that are sent unchanged.
        now_and_then: ``True`` if too many releases point along the update, though most have enough noise.
    """

    pilot: Pilot
    claim: Claim
    clip_norm: float | None
    moved: float
    noise_std: float
    unchanged: float = 0.0
    uncovered: Sequence[Uncovered] = ()
    now_and_then: bool = False

    @property
    def bound(self) -> float | None:
        return None if self.clip_norm is None else self.clip_norm * (2 if self.claim.neighbors == "replace" else 1)

    @property
    def surely_moved(self) -> float:
        """Return ``moved``, less the possible noise in the mean of 1,000 draws."""
        return max(0.0, self.moved - self.noise_std / 10)


def reason_for(found: Measured) -> str:
    """Return the fact that disagrees with the claim, to follow "because"; empty if none stands out."""
    reasons = (_not_covered, _unchanged_values, _clipped_after_noise, _not_clipped, _now_and_then, _too_little_noise)
    return next((reason for find in reasons if (reason := find(found))), "")


def _not_covered(found: Measured) -> str:
    if not found.uncovered or (not found.uncovered[0].moved and found.unchanged >= MOST_UNCHANGED):
        return ""
    return found.uncovered[0].reason


def _now_and_then(found: Measured) -> str:
    if not found.now_and_then:
        return ""
    return "in some calls the update leaves as it is, or with far less noise than in the others"


def _unchanged_values(found: Measured) -> str:
    if found.unchanged < MOST_UNCHANGED:
        return ""
    return "some values leave as they are, neither clipped nor noised"


def _clipped_after_noise(found: Measured) -> str:
    norms, given = found.pilot.norms[0], found.pilot.neighbors.norm
    if given is not None and float(norms.mean()) >= given / BEYOND:
        return ""
    same = float(norms.std()) <= 1e-4 * float(norms.mean())
    if same and bool((found.pilot.deviations > 0).any()):
        return (
            f"what leaves always has the norm {float(norms.mean()):.3g}: the noise is added before the clipping, which"
            " takes most of it away again"
        )
    return ""


def _not_clipped(found: Measured) -> str:
    given, bound, moved = found.pilot.neighbors.norm, found.bound, found.moved
    whole = given is not None and moved >= given / BEYOND
    if bound is None and not whole:
        return ""
    if bound is not None and found.surely_moved <= bound * BEYOND:
        return ""
    if given is not None and whole and (bound is None or given > bound * BEYOND):
        return f"nothing is clipped: an update of norm {given:.3g} moves what is sent by {moved:.3g}"
    return (
        f"one unit moves what is sent by {moved:.3g}, more than the norm {bound:.3g} to which it is said to be clipped"
        " (clipping each array by itself bounds the whole by that norm times the root of their number)"
    )


def _too_little_noise(found: Measured) -> str:
    claim = found.claim
    if claim.delta == 0 or found.noise_std == 0:
        return ""
    moved = found.moved if found.bound is None else min(found.moved, found.bound)
    mu = gaussian_mu(claim.epsilon, claim.delta)
    once = moved / mu if mu else math.inf
    needed = once * math.sqrt(claim.rounds)
    over = "" if claim.rounds == 1 else f" over {claim.rounds} rounds"
    enough = f" (it would do for one round: {once:.3g})" if claim.rounds > 1 and found.noise_std >= once / 1.05 else ""
    return (
        f"the noise has a standard deviation of {found.noise_std:.3g} where one unit moves what is sent by"
        f" {moved:.3g}; the claim{over} needs {needed:.3g}{enough}"
    )
