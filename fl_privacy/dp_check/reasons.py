"""Facts of a mechanism that disagree with its claim, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.dp_check.bounds import gaussian_mu
from fl_privacy.dp_check.claims import Claim
from fl_privacy.dp_check.counted import Drawn
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
        now_and_then: ``True`` if too many releases point along the update, though most have enough noise.
    """

    pilot: Pilot
    claim: Claim
    clip_norm: float | None
    drawn: Drawn
    uncovered: Sequence[Uncovered]
    now_and_then: bool

    @property
    def bound(self) -> float | None:
        return None if self.clip_norm is None else self.clip_norm * (2 if self.claim.neighbors == "replace" else 1)


def reason_for(found: Measured) -> str:
    """Return the fact that disagrees with the claim, to follow "because"; empty if none stands out."""
    bare = found.uncovered[0] if found.uncovered else None
    if bare is not None and (bare.moved or found.drawn.unchanged < MOST_UNCHANGED):
        return bare.reason
    if found.drawn.unchanged >= MOST_UNCHANGED:
        return "some values leave as they are, neither clipped nor noised"
    norms, given = found.pilot.norms[0], found.pilot.neighbors.norm
    mean, noisy = float(norms.mean()), bool((found.pilot.deviations > 0).any())
    if noisy and float(norms.std()) <= 1e-4 * mean and (given is None or mean < given / BEYOND):
        return (
            f"what leaves always has the norm {mean:.3g}: the noise is added before the clipping, which takes most of"
            " it away again"
        )
    if reason := _not_clipped(found):
        return reason
    if found.now_and_then:
        return "in some calls the update leaves as it is, or with far less noise than in the others"
    return _too_little_noise(found)


def _not_clipped(found: Measured) -> str:
    given, bound, moved = found.pilot.neighbors.norm, found.bound, found.drawn.moved
    whole = given is not None and moved >= given / BEYOND
    if bound is None and not whole:
        return ""
    surely = max(0.0, moved - found.drawn.noise_std / 10)  # less the possible noise in the mean of 1,000 draws
    if bound is not None and surely <= bound * BEYOND:
        return ""
    if given is not None and whole and (bound is None or given > bound * BEYOND):
        return f"nothing is clipped: an update of norm {given:.3g} moves what is sent by {moved:.3g}"
    return (
        f"one unit moves what is sent by {moved:.3g}, more than the norm {bound:.3g} to which it is said to be clipped"
        " (clipping each array by itself bounds the whole by that norm times the root of their number)"
    )


def _too_little_noise(found: Measured) -> str:
    claim, noise, moved = found.claim, found.drawn.noise_std, found.drawn.moved
    if claim.delta == 0 or noise == 0:
        return ""
    moved = moved if found.bound is None else min(moved, found.bound)
    mu = gaussian_mu(claim.epsilon, claim.delta)
    once = moved / mu if mu else math.inf
    needed = once * math.sqrt(claim.rounds)
    over = "" if claim.rounds == 1 else f" over {claim.rounds} rounds"
    enough = f" (it would do for one round: {once:.3g})" if claim.rounds > 1 and noise >= once / 1.05 else ""
    return (
        f"the noise has a standard deviation of {noise:.3g} where one unit moves what is sent by"
        f" {moved:.3g}; the claim{over} needs {needed:.3g}{enough}"
    )
