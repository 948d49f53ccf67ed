"""Client-side defenses: each is a ``Defense`` of hooks."""

from fl_privacy.defenses._ats import ats
from fl_privacy.defenses._dp_merf import dp_merf
from fl_privacy.defenses._dp_noise import dp_noise, dp_sgd, local_dp
from fl_privacy.defenses._fdl_pp import fdl_pp
from fl_privacy.defenses._gs_wgan import gs_wgan
from fl_privacy.defenses._instahide import instahide
from fl_privacy.defenses._pruning import ppdl, pruning, selective_sharing
from fl_privacy.defenses._quantization import quantization
from fl_privacy.defenses._recup_fl import recup_fl
from fl_privacy.defenses._refiner import refiner
from fl_privacy.defenses._soteria import soteria, soteria_mixing
from fl_privacy.defenses._split_fed import split_fed
from fl_privacy.defenses._spn import spn
from fl_privacy.defenses.dc_dsa_dm import dc, dm, dsa
from fl_privacy.defenses.defense import ClientState, Defense, LocalData, LocalStep, compose, none

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
