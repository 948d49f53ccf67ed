"""Noise on updates, gradients or slices of them."""

from fl_privacy.defenses.noise.clipped import dp_noise, dp_sgd, local_dp
from fl_privacy.defenses.noise.misleading import recup_fl
from fl_privacy.defenses.noise.slices import soteria_mixing

__all__ = ["dp_noise", "dp_sgd", "local_dp", "recup_fl", "soteria_mixing"]
