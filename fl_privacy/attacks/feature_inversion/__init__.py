"""Model inversion: images from what the first layers of a model put out."""

from fl_privacy.attacks.feature_inversion.attack import ModelInversion
from fl_privacy.attacks.feature_inversion.lemma import recover_by_lemma

__all__ = ["ModelInversion", "recover_by_lemma"]
