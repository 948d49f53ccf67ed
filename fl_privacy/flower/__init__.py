"""The edge to Flower: clients, strategies, apps and backends; translates records, adds no mathematics."""

from fl_privacy.flower.answering_once import answer_once_mod
from fl_privacy.flower.auditing import AuditedStrategy, audit
from fl_privacy.flower.backends import run_in_process, run_on_grid, run_ray
from fl_privacy.flower.canary_mod import canary_mod
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
from fl_privacy.flower.defended_client import DefendedClient, defend
from fl_privacy.flower.defense_mods import defense_mod
from fl_privacy.flower.guarding import guard_mod
from fl_privacy.flower.interception import HonestButCurious
from fl_privacy.flower.malicious_strategy import Malicious
from fl_privacy.flower.memory import NodeMemory, node_memory
from fl_privacy.flower.mods import local_dp_mod
from fl_privacy.flower.node_secrets import node_secret
from fl_privacy.flower.probe_mods import probe_mod
from fl_privacy.flower.sane import Sane
from fl_privacy.flower.strategy import Federated
from fl_privacy.flower.training_defense import DefendedTraining, private_loader, train_step
from fl_privacy.flower.transport import LocalGrid

__all__ = [
    "ATSClient",
    "AuditedStrategy",
    "DPClient",
    "DefendedClient",
    "DefendedTraining",
    "Federated",
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
    "run_in_process",
    "run_on_grid",
    "run_ray",
    "simulated_client_app",
    "train_step",
]
