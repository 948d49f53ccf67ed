"""The edge to Flower: clients, strategies, apps and backends; translates records, adds no mathematics."""

from fl_privacy.flower.adapter import numpy_client_app, simulated_client_app
from fl_privacy.flower.backends import run_in_process, run_on_grid, run_ray
from fl_privacy.flower.client import (
    ATSClient,
    DPClient,
    PassportClient,
    PrivacyClient,
    PruningClient,
    RefinerClient,
    SplitFedClient,
    SPNClient,
)
from fl_privacy.flower.defend import DefendedClient, defend
from fl_privacy.flower.grid import LocalGrid
from fl_privacy.flower.interception import HonestButCurious
from fl_privacy.flower.local_dp_mod import local_dp_mod
from fl_privacy.flower.node_secret import node_secret
from fl_privacy.flower.sane import Sane
from fl_privacy.flower.strategy import Federated

__all__ = [
    "ATSClient",
    "DPClient",
    "DefendedClient",
    "Federated",
    "HonestButCurious",
    "LocalGrid",
    "PassportClient",
    "PrivacyClient",
    "PruningClient",
    "RefinerClient",
    "SPNClient",
    "Sane",
    "SplitFedClient",
    "defend",
    "local_dp_mod",
    "node_secret",
    "numpy_client_app",
    "run_in_process",
    "run_on_grid",
    "run_ray",
    "simulated_client_app",
]
