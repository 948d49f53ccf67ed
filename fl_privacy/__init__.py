"""Simulated federated training whose updates are attacked, defended and judged.

What is used most is here under one name; it is imported when it is first asked for, so that attacks, defenses, metrics
and models run where only PyTorch is installed, and nothing waits for Flower that does without.
"""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.attacks import reconstruct as reconstruct
    from fl_privacy.defenses import Defense as Defense
    from fl_privacy.defenses import compose as compose
    from fl_privacy.federation import Audit as Audit
    from fl_privacy.federation import Client as Client
    from fl_privacy.flower import (
        HonestButCurious as HonestButCurious,
    )
    from fl_privacy.flower import (
        PrivacyClient as PrivacyClient,
    )
    from fl_privacy.flower import (
        audit as audit,
    )
    from fl_privacy.flower import (
        defend as defend,
    )
    from fl_privacy.flower import (
        defense_mod as defense_mod,
    )
    from fl_privacy.flower import (
        probe_mod as probe_mod,
    )
    from fl_privacy.interception import Interceptor as Interceptor
    from fl_privacy.interception import load_observations as load_observations
    from fl_privacy.metrics import evaluate as evaluate
    from fl_privacy.report.loggers import log_run as log_run
    from fl_privacy.report.notebook import show as show
    from fl_privacy.results.frames import to_dataframe as to_dataframe
    from fl_privacy.types import (
        Batch as Batch,
    )
    from fl_privacy.types import (
        Knowledge as Knowledge,
    )
    from fl_privacy.types import (
        LocalPlan as LocalPlan,
    )
    from fl_privacy.types import (
        ModelState as ModelState,
    )
    from fl_privacy.types import (
        Observation as Observation,
    )
    from fl_privacy.types import (
        Reconstruction as Reconstruction,
    )
    from fl_privacy.types import (
        Upload as Upload,
    )
    from fl_privacy.types import (
        VictimId as VictimId,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
