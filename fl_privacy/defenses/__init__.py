"""Client-side defenses: each is a ``Defense`` of hooks."""

from fl_privacy.defenses.ats import ats
from fl_privacy.defenses.base import ClientState, Defense, LocalData, LocalStep, compose
from fl_privacy.defenses.condensation import dc, dm, dp_merf, dsa, gs_wgan
from fl_privacy.defenses.dp_noise import dp_noise
from fl_privacy.defenses.dp_sgd import dp_sgd
from fl_privacy.defenses.fdl_pp import fdl_pp
from fl_privacy.defenses.instahide import instahide
from fl_privacy.defenses.local_dp import local_dp
from fl_privacy.defenses.none import none
from fl_privacy.defenses.ppdl import ppdl
from fl_privacy.defenses.pruning import pruning
from fl_privacy.defenses.quantization import quantization
from fl_privacy.defenses.refiner import refiner
from fl_privacy.defenses.selective_sharing import selective_sharing
from fl_privacy.defenses.soteria import soteria
from fl_privacy.defenses.soteria_mixing import soteria_mixing
from fl_privacy.defenses.split_fed import split_fed
from fl_privacy.defenses.spn import spn

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
    "refiner",
    "selective_sharing",
    "soteria",
    "soteria_mixing",
    "split_fed",
    "spn",
]
