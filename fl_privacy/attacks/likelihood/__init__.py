"""Find the likeliest images, rows and texts behind defended updates."""

from fl_privacy.attacks.likelihood.attack import MaximumAPosteriori
from fl_privacy.attacks.likelihood.blind import BlindDeconvolution
from fl_privacy.attacks.likelihood.channel import Belief, Clientele, Setting, likelihood_of

__all__ = ["Belief", "BlindDeconvolution", "Clientele", "MaximumAPosteriori", "Setting", "likelihood_of"]
