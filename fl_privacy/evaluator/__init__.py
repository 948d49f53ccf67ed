"""Refiner's evaluation network: how much of an image is noise, as people see it."""

from fl_privacy.evaluator.find import CachedEvaluator, find_evaluator
from fl_privacy.evaluator.network import EvaluationNetwork
from fl_privacy.evaluator.store import load_evaluator, read_about, save_evaluator
from fl_privacy.evaluator.training import (
    EvaluatorPlan,
    Progress,
    blend_with_noise,
    noise_curve,
    train_evaluator,
    uniform_noise,
)

__all__ = [
    "CachedEvaluator",
    "EvaluationNetwork",
    "EvaluatorPlan",
    "Progress",
    "blend_with_noise",
    "find_evaluator",
    "load_evaluator",
    "noise_curve",
    "read_about",
    "save_evaluator",
    "train_evaluator",
    "uniform_noise",
]
