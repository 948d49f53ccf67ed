"""Dataset condensation: a client trains on a few made-up images instead of its own."""

from fl_privacy.defenses.condensation.distribution_matching import dm
from fl_privacy.defenses.condensation.gradient_matching import dc, dsa

__all__ = ["dc", "dm", "dsa"]
