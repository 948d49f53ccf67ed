"""Layers that stay with each client."""

from fl_privacy.defenses.private_layers.modulation import fdl_pp
from fl_privacy.defenses.private_layers.polarization import spn
from fl_privacy.defenses.private_layers.split import split_fed

__all__ = ["fdl_pp", "split_fed", "spn"]
