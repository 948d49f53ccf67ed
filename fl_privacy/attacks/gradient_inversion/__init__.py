"""Reconstruct inputs by optimizing them until their gradient is the observed one."""

from fl_privacy.attacks.gradient_inversion.attack import GradientInversion as GradientInversion
from fl_privacy.attacks.gradient_inversion.settings import (
    Compile as Compile,
    DType as DType,
    LabelPolicy as LabelPolicy,
    Projection as Projection,
    Settings as Settings,
    Space as Space,
)
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps as LocalSteps
