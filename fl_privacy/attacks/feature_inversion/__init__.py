"""Model inversion: images from the output of a model's first layers."""

from fl_privacy.attacks.feature_inversion.attack import (
    FeatureSource,
    FrontPolicy,
    ModelInversion,
    Recovery,
    recover_by_lemma,
)

__all__ = ["FeatureSource", "FrontPolicy", "ModelInversion", "Recovery", "recover_by_lemma"]
