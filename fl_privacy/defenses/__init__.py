"""Client-side defenses: each is a ``Defense`` of hooks."""

from fl_privacy.defenses.base import ClientState, Defense, LocalStep, compose
from fl_privacy.defenses.dp_noise import dp_noise
from fl_privacy.defenses.dp_sgd import dp_sgd
from fl_privacy.defenses.fdl_pp import fdl_pp
from fl_privacy.defenses.local_dp import local_dp
from fl_privacy.defenses.none import none
from fl_privacy.defenses.pruning import pruning
from fl_privacy.defenses.quantization import quantization
from fl_privacy.defenses.refiner import refiner
from fl_privacy.defenses.selective_sharing import selective_sharing
from fl_privacy.defenses.soteria import soteria
from fl_privacy.defenses.soteria_mixing import soteria_mixing
from fl_privacy.defenses.split_fed import split_fed

__all__ = [
    "ClientState",
    "Defense",
    "LocalStep",
    "compose",
    "dp_noise",
    "dp_sgd",
    "fdl_pp",
    "local_dp",
    "none",
    "pruning",
    "quantization",
    "refiner",
    "selective_sharing",
    "soteria",
    "soteria_mixing",
    "split_fed",
]
