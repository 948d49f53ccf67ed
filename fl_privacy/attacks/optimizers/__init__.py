"""Optimizers of many independent victims at once."""

from fl_privacy.attacks.optimizers.base import Optimizer, OptimizerRun
from fl_privacy.attacks.optimizers.evolution import EvolutionStrategy
from fl_privacy.attacks.optimizers.first_order import Adam, GradientDescent
from fl_privacy.attacks.optimizers.lbfgs import LBFGS
from fl_privacy.attacks.optimizers.schedules import ConstantRate, CosineRate, Schedule, StairDecay, StepDecay

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
