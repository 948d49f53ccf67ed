"""Simulation of federated training, with attacks on its updates, defenses, and measures of leakage."""

from typing import TYPE_CHECKING

from fl_privacy._moved import answer_to_old_names
from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.attacks import reconstruct as reconstruct
    from fl_privacy.auditing.strategy import audit as audit
    from fl_privacy.defenses import Defense as Defense, compose as compose
    from fl_privacy.federation import Audit as Audit, Client as Client
    from fl_privacy.federation.interception import Interceptor as Interceptor, load_observations as load_observations
    from fl_privacy.flower import (
        HonestButCurious as HonestButCurious,
        PrivacyClient as PrivacyClient,
        defend as defend,
        defense_mod as defense_mod,
        probe_mod as probe_mod,
    )
    from fl_privacy.measure import evaluate as evaluate
    from fl_privacy.report.loggers import log_run as log_run
    from fl_privacy.report.notebook import show as show
    from fl_privacy.runs.folder.frames import to_dataframe as to_dataframe
    from fl_privacy.types import (
        Batch as Batch,
        Knowledge as Knowledge,
        LocalPlan as LocalPlan,
        ModelState as ModelState,
        Observation as Observation,
        Reconstruction as Reconstruction,
        Upload as Upload,
        VictimId as VictimId,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)

answer_to_old_names()
