"""The edge to Flower: clients, strategies, apps and backends; translates records, adds no mathematics."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand
from fl_privacy.flower._node_memory import NodeMemory, node_memory, node_secret
from fl_privacy.flower.backends import rounds_in_process, rounds_on_grid, rounds_on_ray
from fl_privacy.flower.client_app import numpy_client_app, simulated_client_app
from fl_privacy.flower.clients import (
    ATSClient,
    DPClient,
    PassportClient,
    PrivacyClient,
    PruningClient,
    RefinerClient,
    SplitFedClient,
    SPNClient,
)
from fl_privacy.flower.curious import HonestButCurious
from fl_privacy.flower.gate import Gate
from fl_privacy.flower.grids import LocalGrid
from fl_privacy.flower.malicious import Malicious
from fl_privacy.flower.mods.canary_mod import canary_mod
from fl_privacy.flower.mods.defend import DefendedClient, defend
from fl_privacy.flower.mods.defense_mod import defense_mod
from fl_privacy.flower.mods.guard_mod import guard_mod
from fl_privacy.flower.mods.probe import probe_mod
from fl_privacy.flower.mods.train_step import DefendedTraining, private_loader, train_step
from fl_privacy.flower.reply_cache import answer_once_mod
from fl_privacy.flower.secagg import local_dp_mod
from fl_privacy.flower.strategy import Federated
from fl_privacy.flower.wrappers import Sane

if TYPE_CHECKING:
    from fl_privacy.auditing.strategy import AuditedStrategy, audit

__all__ = [
    "ATSClient",
    "AuditedStrategy",
    "DPClient",
    "DefendedClient",
    "DefendedTraining",
    "Federated",
    "Gate",
    "HonestButCurious",
    "LocalGrid",
    "Malicious",
    "NodeMemory",
    "PassportClient",
    "PrivacyClient",
    "PruningClient",
    "RefinerClient",
    "SPNClient",
    "Sane",
    "SplitFedClient",
    "answer_once_mod",
    "audit",
    "canary_mod",
    "defend",
    "defense_mod",
    "guard_mod",
    "local_dp_mod",
    "node_memory",
    "node_secret",
    "numpy_client_app",
    "private_loader",
    "probe_mod",
    "rounds_in_process",
    "rounds_on_grid",
    "rounds_on_ray",
    "simulated_client_app",
    "train_step",
]

__getattr__ = on_demand(__name__, {"fl_privacy.auditing.strategy": ("AuditedStrategy", "audit")})
