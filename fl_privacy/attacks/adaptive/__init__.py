"""Countermeasures of an attack that knows the defense."""

from fl_privacy.attacks.adaptive.constraints import (
    AssumedTransform,
    Clips,
    Constraints,
    HiddenGradient,
    KnownFeatures,
    Unknowns,
    UpdateConstraints,
    all_known,
    choose_transforms,
    estimate_clip_norm,
    estimate_noise_std,
    estimate_step,
)
from fl_privacy.attacks.adaptive.countermeasures import (
    Circumstances,
    Countermeasure,
    countermeasures_against,
    looks_noisy,
)
from fl_privacy.attacks.adaptive.known_defense import KnownDefense, uncountered

__all__ = [
    "AssumedTransform",
    "Circumstances",
    "Clips",
    "Constraints",
    "Countermeasure",
    "HiddenGradient",
    "KnownDefense",
    "KnownFeatures",
    "Unknowns",
    "UpdateConstraints",
    "all_known",
    "choose_transforms",
    "countermeasures_against",
    "estimate_clip_norm",
    "estimate_noise_std",
    "estimate_step",
    "looks_noisy",
    "uncountered",
]
