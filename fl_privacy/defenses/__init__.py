"""Client-side defenses: each is a ``Defense`` of hooks."""

from fl_privacy.defenses.compression import ppdl, pruning, quantization, selective_sharing
from fl_privacy.defenses.condensation import dc, dm, dp_merf, dsa, gs_wgan
from fl_privacy.defenses.data import ats, instahide, refiner
from fl_privacy.defenses.defense import ClientState, Defense, LocalData, LocalStep, compose, none
from fl_privacy.defenses.noise import dp_noise, dp_sgd, local_dp, recup_fl, soteria_mixing
from fl_privacy.defenses.private_layers import fdl_pp, split_fed, spn
from fl_privacy.defenses.representation import soteria

__all__ = [
    "ClientState",
    "Defense",
    "LocalData",
    "LocalStep",
    "ats",
    "compose",
    "dc",
    "dm",
    "dp_merf",
    "dp_noise",
    "dp_sgd",
    "dsa",
    "fdl_pp",
    "gs_wgan",
    "instahide",
    "local_dp",
    "none",
    "ppdl",
    "pruning",
    "quantization",
    "recup_fl",
    "refiner",
    "selective_sharing",
    "soteria",
    "soteria_mixing",
    "split_fed",
    "spn",
]
