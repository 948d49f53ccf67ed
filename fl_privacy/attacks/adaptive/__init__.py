"""What an attack that knows the defense does about it."""

from fl_privacy.attacks.adaptive.counter import Counter, Told, counter
from fl_privacy.attacks.adaptive.estimates import (
    estimate_clip_norm,
    estimate_noise_std,
    estimate_sparsity,
    estimate_step,
)
from fl_privacy.attacks.adaptive.rounds import Victim, victims_of
from fl_privacy.attacks.adaptive.scene import Scene

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
