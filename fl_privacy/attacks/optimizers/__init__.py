"""Optimizers of many independent victims at once."""

from fl_privacy.attacks.optimizers.base import Optimizer, OptimizerRun
from fl_privacy.attacks.optimizers.cma import EvolutionStrategy
from fl_privacy.attacks.optimizers.first_order import (
    Adam,
    ConstantRate,
    CosineRate,
    GradientDescent,
    Schedule,
    StairDecay,
    StepDecay,
)
from fl_privacy.attacks.optimizers.lbfgs import LBFGS

__all__ = [
    "LBFGS",
    "Adam",
    "ConstantRate",
    "CosineRate",
    "EvolutionStrategy",
    "GradientDescent",
    "Optimizer",
    "OptimizerRun",
    "Schedule",
    "StairDecay",
    "StepDecay",
]
