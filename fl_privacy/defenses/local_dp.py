"""Local differential privacy as Flower's ``LocalDpMod`` does it."""

import math

from fl_privacy.defenses.base import Defense
from fl_privacy.defenses.checks import expect_number
from fl_privacy.defenses.dp_noise import dp_noise


def local_dp(
    *, round_epsilon: float = 1.0, delta: float = 1e-5, clip_norm: float = 1.0, sensitivity: float | None = None
) -> Defense:
    """Clipped Gaussian noise calibrated to one round by the classical formula (Dwork and Roth 2014, Theorem A.1).

    The update has the distribution that Flower's ``LocalDpMod(clip_norm, sensitivity, round_epsilon, delta)`` gives
    it. The formula is proven up to epsilon 1 and speaks of one round; ``accounting.guarantee`` says what holds after
    many.

    Args:
        round_epsilon: the budget of one round, above 0.
        delta: in (0, 1).
        clip_norm: l2 norm the update is scaled down to, above 0.
        sensitivity: l2 distance that the calibration hides; ``None`` takes ``clip_norm``.
    """
    expect_number("defense.round_epsilon", round_epsilon, above=0, example=1.0)
    expect_number("defense.delta", delta, above=0, below=1, example=1e-5)
    if sensitivity is None:
        sensitivity = clip_norm
    expect_number("defense.sensitivity", sensitivity, at_least=0, example=1.0)
    scale = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / round_epsilon
    return dp_noise(noise="gaussian", scale=scale, clip_norm=clip_norm)
