"""Optimizers that minimize many victims' losses at once, independently."""

from fl_privacy.attacks.optimizers.first_order import (
    Adam as Adam,
    ConstantRate as ConstantRate,
    CosineRate as CosineRate,
    EvolutionStrategy as EvolutionStrategy,
    FirstOrder as FirstOrder,
    GradientDescent as GradientDescent,
    Schedule as Schedule,
    StairDecay as StairDecay,
    StepDecay as StepDecay,
)
from fl_privacy.attacks.optimizers.lbfgs import LBFGS as LBFGS

Optimizer = FirstOrder | LBFGS  # settings that start an optimization of any number of victims
