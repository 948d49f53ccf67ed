"""Refiner's evaluation network: how much of an image is noise, as people see it."""

from fl_privacy.evaluator.blend import blend_with_noise, uniform_noise
from fl_privacy.evaluator.curve import noise_curve
from fl_privacy.evaluator.find import KeptEvaluator, find_evaluator
from fl_privacy.evaluator.network import EvaluationNetwork
from fl_privacy.evaluator.store import load_evaluator, read_about, save_evaluator
from fl_privacy.evaluator.training import EvaluatorPlan, Progress, train_evaluator

__all__ = [
    "EvaluationNetwork",
    "EvaluatorPlan",
    "KeptEvaluator",
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
