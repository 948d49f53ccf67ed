"""Central data types: examples, models, uploads, an attacker's knowledge and its reconstructions."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.types.nouns import (
        Batch as Batch,
        Knowledge as Knowledge,
        ModelState as ModelState,
        Observation as Observation,
        Reconstruction as Reconstruction,
        Tensors as Tensors,
        Upload as Upload,
    )
    from fl_privacy.types.plan import LocalPlan as LocalPlan
    from fl_privacy.types.victim_ids import Certainty as Certainty, VictimId as VictimId
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
