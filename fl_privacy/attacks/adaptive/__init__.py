"""Countermeasures of an attack that knows the defense."""

from fl_privacy.attacks.adaptive.constraints import (
    AssumedTransform as AssumedTransform,
    Clips as Clips,
    Constraints as Constraints,
    HiddenGradient as HiddenGradient,
    KnownFeatures as KnownFeatures,
    Unknowns as Unknowns,
    UpdateConstraints as UpdateConstraints,
    all_known as all_known,
    choose_transforms as choose_transforms,
    estimate_clip_norm as estimate_clip_norm,
    estimate_noise_std as estimate_noise_std,
    estimate_step as estimate_step,
)
from fl_privacy.attacks.adaptive.known_defense import (
    AttackSetting as AttackSetting,
    Countermeasure as Countermeasure,
    KnownDefense as KnownDefense,
    countermeasures_against as countermeasures_against,
    looks_noisy as looks_noisy,
    without_countermeasure as without_countermeasure,
)
