"""Reconstruct inputs whose gradient is the observed one."""

from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.settings import Compile, DType, LabelPolicy, Projection, Settings, Space
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps

__all__ = [
    "Compile",
    "DType",
    "GradientInversion",
    "LabelPolicy",
    "LocalSteps",
    "Projection",
    "Settings",
    "Space",
]
