"""Checks of differential privacy claims: recomputation, statistical tests of many draws, and canaries."""

from fl_privacy.dp_check.claims import Claim, Facts, Recomputed, recompute
from fl_privacy.dp_check.draws import Neighbors
from fl_privacy.dp_check.mechanism import MechanismCheck, check_mechanism

__all__ = ["Claim", "Facts", "MechanismCheck", "Neighbors", "Recomputed", "check_mechanism", "recompute"]
