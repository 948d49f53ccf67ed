"""Says which fact of a mechanism disagrees with its claim."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fl_privacy.dp_check.bounds import gaussian_mu
from fl_privacy.dp_check.claims import Claim
from fl_privacy.dp_check.draws import DIFFERENCE, Pilot

MOST_UNCHANGED = 0.5
"""Values of a release, on average, that may leave exactly as they are before that is named as a reason."""

BEYOND = 1.1
"""By which factor a measured norm must exceed the one claimed before it is named as a reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Findings of draws on the pair of neighbors that is easiest to distinguish.

    Attributes:
        pilot: the first few draws on them.
        places: of the arrays in a release.
        claim: that was contradicted.
        clip_norm: l2 norm to which one unit's contribution is said to be clipped, if anybody says so.
        moved: by how much the unit moves what is sent, in the direction that tells most.
        noise_std: standard deviation of the noise in that direction.
        by: name of that direction.
        unchanged: mean number of values of the first neighbor that leave exactly as they are.
    """

    pilot: Pilot
    places: Mapping[str, slice]
    claim: Claim
    clip_norm: float | None
    moved: float
    noise_std: float
    by: str = ""
    unchanged: float = 0.0

    @property
    def bound(self) -> float | None:
        """Return by how much one unit may move what is sent, if it is clipped as stated."""
        return None if self.clip_norm is None else self.clip_norm * (2 if self.claim.neighbors == "replace" else 1)

    @property
    def surely_moved(self) -> float:
        """Return ``moved``, less what the noise in the mean of 1,000 draws may add."""
        return max(0.0, self.moved - self.noise_std / 10)


def reason_for(found: Measured) -> str:
    """Name the fact that disagrees with the claim, in words that follow "because"; empty where none stands out."""
    reasons = (
        _without_noise,
        _same_noise_twice,
        _unchanged_values,
        _clipped_after_noise,
        _not_clipped,
        _too_little_noise,
    )
    return next((reason for find in reasons if (reason := find(found))), "")


def _without_noise(found: Measured) -> str:
    drawn, bare = found.pilot, found.pilot.bare
    if not bool(bare.any()):
        return ""
    if bool(drawn.constant.all()):
        return (
            "no noise is added: the same data give the same reply"
            if _nothing_is_nothing(drawn)
            else "the same noise is added each time, so that two replies differ by the data alone"
        )
    names = [name for name, place in found.places.items() if bool(bare[place].any())]
    kept = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{kept} {'leaves' if len(names) == 1 else 'leave'} without noise"


def _same_noise_twice(found: Measured) -> str:
    """Say that two arrays, such as those of two clients, carry the same noise: their difference has none."""
    spread = float(found.pilot.deviations.max())
    if not found.by.startswith(DIFFERENCE) or found.noise_std > 1e-3 * spread:
        return ""
    return f"{found.by.removeprefix(DIFFERENCE)} carry the same noise, so that their difference has none"


def _unchanged_values(found: Measured) -> str:
    if found.unchanged < MOST_UNCHANGED:
        return ""
    return "some values leave as they are, neither clipped nor noised"


def _nothing_is_nothing(drawn: Pilot) -> bool:
    """Say whether a reply without the unit is zero, or the negative of the one with it."""
    silent = float(drawn.means[1].norm()) <= 1e-9 * float(drawn.means[0].norm())
    return silent or bool((drawn.means[0] + drawn.means[1]).norm() <= 1e-4 * drawn.means[0].norm())


def _clipped_after_noise(found: Measured) -> str:
    """Say that replies have the same norm each time although their values vary, and not the norm of what was given."""
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
