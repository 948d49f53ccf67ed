"""Observation of third-party training code through PyTorch's hooks: data, model, loss and steps, without Flower."""

from fl_privacy.auditing.clear_text.findings import Leak, findings_of
from fl_privacy.auditing.clear_text.inventory import Inventory, Sent
from fl_privacy.auditing.instrument.matching import Matched, matched
from fl_privacy.auditing.instrument.program import Program, ReplayModel
from fl_privacy.auditing.instrument.watch import TrainingWatch, Watched

__all__ = [
    "Inventory",
    "Leak",
    "Matched",
    "Program",
    "ReplayModel",
    "Sent",
    "TrainingWatch",
    "Watched",
    "findings_of",
    "matched",
]
