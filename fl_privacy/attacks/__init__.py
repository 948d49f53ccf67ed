"""Attacks on intercepted updates."""

from fl_privacy.attacks.base import Progress, ReconstructionAttack, no_progress
from fl_privacy.attacks.engine import GradientInversion
from fl_privacy.attacks.presets import dlg, idlg, inverting_gradients

__all__ = [
    "GradientInversion",
    "Progress",
    "ReconstructionAttack",
    "dlg",
    "idlg",
    "inverting_gradients",
    "no_progress",
]
