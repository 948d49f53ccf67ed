"""Refiner's evaluation network: how much of an image is noise, how many words of a text are random."""

from fl_privacy.evaluator.find import CachedEvaluator, find_evaluator
from fl_privacy.evaluator.find_words import find_word_evaluator, name_of_words
from fl_privacy.evaluator.network import EvaluationNetwork
from fl_privacy.evaluator.store import Evaluator, load_evaluator, read_about, save_evaluator
from fl_privacy.evaluator.training import (
    EvaluatorPlan,
    Progress,
    blend_with_noise,
    noise_curve,
    student_plan,
    train_evaluator,
    uniform_noise,
)
from fl_privacy.evaluator.words import (
    TEXTS,
    WordBox,
    WordEvaluator,
    mix_with_random_words,
    random_word_curve,
    train_word_evaluator,
)

__all__ = [
    "TEXTS",
    "CachedEvaluator",
    "EvaluationNetwork",
    "Evaluator",
    "EvaluatorPlan",
    "Progress",
    "WordBox",
    "WordEvaluator",
    "blend_with_noise",
    "find_evaluator",
    "find_word_evaluator",
    "load_evaluator",
    "mix_with_random_words",
    "name_of_words",
    "noise_curve",
    "random_word_curve",
    "read_about",
    "save_evaluator",
    "student_plan",
    "train_evaluator",
    "train_word_evaluator",
    "uniform_noise",
]
