"""Dataset condensation: a client trains on a few made-up images instead of its own."""

from fl_privacy.defenses.condensation.distribution_matching import dm
from fl_privacy.defenses.condensation.gradient_matching import dc, dsa
from fl_privacy.defenses.condensation.mean_embedding import dp_merf
from fl_privacy.defenses.condensation.wasserstein import gs_wgan

__all__ = ["dc", "dm", "dp_merf", "dsa", "gs_wgan"]
