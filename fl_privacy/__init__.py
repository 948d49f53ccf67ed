"""Simulated federated training whose updates are attacked, defended and judged.

What is used most is here under one name; it is imported when it is first asked for, so that attacks, defenses, metrics
and models run where only PyTorch is installed, and nothing waits for Flower that does without.
"""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.attacks import reconstruct
    from fl_privacy.defenses import Defense, compose
    from fl_privacy.federation import Audit, Client
    from fl_privacy.flower import HonestButCurious, PrivacyClient, audit, defend, defense_mod, probe_mod
    from fl_privacy.interception import Interceptor, load_observations
    from fl_privacy.metrics import evaluate
    from fl_privacy.report.loggers import log_run
    from fl_privacy.report.notebook import show
    from fl_privacy.results.frames import to_dataframe
    from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Reconstruction, Upload, VictimId

_HOMES = {
    "fl_privacy.attacks": ("reconstruct",),
    "fl_privacy.defenses": ("Defense", "compose"),
    "fl_privacy.federation": (
        "Audit",
        "Client",
    ),
    "fl_privacy.flower": ("HonestButCurious", "PrivacyClient", "audit", "defend", "defense_mod", "probe_mod"),
    "fl_privacy.interception": ("Interceptor", "load_observations"),
    "fl_privacy.metrics": ("evaluate",),
    "fl_privacy.report.loggers": ("log_run",),
    "fl_privacy.report.notebook": ("show",),
    "fl_privacy.results.frames": ("to_dataframe",),
    "fl_privacy.types": (
        "Batch",
        "Knowledge",
        "LocalPlan",
        "ModelState",
        "Observation",
        "Reconstruction",
        "Upload",
        "VictimId",
    ),
}

__all__ = [
    "Audit",
    "Batch",
    "Client",
    "Defense",
    "HonestButCurious",
    "Interceptor",
    "Knowledge",
    "LocalPlan",
    "ModelState",
    "Observation",
    "PrivacyClient",
    "Reconstruction",
    "Upload",
    "VictimId",
    "audit",
    "compose",
    "defend",
    "defense_mod",
    "evaluate",
    "load_observations",
    "log_run",
    "probe_mod",
    "reconstruct",
    "show",
    "to_dataframe",
]


__getattr__ = on_demand(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
