"""The interface to Flower: clients, strategies, apps and backends."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.auditing.strategy import AuditedStrategy as AuditedStrategy, audit as audit
    from fl_privacy.flower._node_memory import (
        NodeMemory as NodeMemory,
        node_memory as node_memory,
        node_secret as node_secret,
    )
    from fl_privacy.flower.backends import (
        rounds_in_process as rounds_in_process,
        rounds_on_grid as rounds_on_grid,
        rounds_on_ray as rounds_on_ray,
    )
    from fl_privacy.flower.client_app import (
        numpy_client_app as numpy_client_app,
        simulated_client_app as simulated_client_app,
    )
    from fl_privacy.flower.clients import (
        ATSClient as ATSClient,
        DPClient as DPClient,
        PassportClient as PassportClient,
        PrivacyClient as PrivacyClient,
        PruningClient as PruningClient,
        RefinerClient as RefinerClient,
        SplitFedClient as SplitFedClient,
        SPNClient as SPNClient,
    )
    from fl_privacy.flower.curious import HonestButCurious as HonestButCurious, Malicious as Malicious, Sane as Sane
    from fl_privacy.flower.gate import Gate as Gate
    from fl_privacy.flower.grids import LocalGrid as LocalGrid
    from fl_privacy.flower.mods.canary_mod import canary_mod as canary_mod
    from fl_privacy.flower.mods.defend import (
        DefendedClient as DefendedClient,
        defend as defend,
        defense_mod as defense_mod,
    )
    from fl_privacy.flower.mods.guard_mod import guard_mod as guard_mod
    from fl_privacy.flower.mods.probe import probe_mod as probe_mod
    from fl_privacy.flower.mods.train_step import (
        DefendedTraining as DefendedTraining,
        private_loader as private_loader,
        train_step as train_step,
    )
    from fl_privacy.flower.reply_cache import answer_once_mod as answer_once_mod
    from fl_privacy.flower.secagg import local_dp_mod as local_dp_mod
    from fl_privacy.flower.strategy import Federated as Federated
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
