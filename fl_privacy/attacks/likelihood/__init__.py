"""The likeliest images behind defended updates."""

from fl_privacy.attacks.likelihood.attack import MaximumAPosteriori
from fl_privacy.attacks.likelihood.channel import Belief, Clientele, Setting, likelihood_of

__all__ = ["Belief", "Clientele", "MaximumAPosteriori", "Setting", "likelihood_of"]
