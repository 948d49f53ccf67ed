"""What an attack that knows the defense does about it."""

from fl_privacy.attacks.adaptive.circumstances import Scene
from fl_privacy.attacks.adaptive.estimates import (
    estimate_clip_norm,
    estimate_noise_std,
    estimate_sparsity,
    estimate_step,
)
from fl_privacy.attacks.adaptive.known_defense import Counter, Told, counter
from fl_privacy.attacks.gradient_inversion.rounds import Victim, victims_of

__all__ = [
    "Counter",
    "Scene",
    "Told",
    "Victim",
    "counter",
    "estimate_clip_norm",
    "estimate_noise_std",
    "estimate_sparsity",
    "estimate_step",
    "victims_of",
]
