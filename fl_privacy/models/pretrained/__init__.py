"""Pretrained networks in files: Refiner's evaluation network, and image generators."""

from fl_privacy.models.pretrained.evaluator import (
    EvaluationNetwork,
    EvaluatorPlan,
    Progress,
    blend_with_noise,
    noise_curve,
    student_plan,
    train_evaluator,
    uniform_noise,
)
from fl_privacy.models.pretrained.evaluator_files import (
    CachedEvaluator,
    Evaluator,
    find_evaluator,
    load_evaluator,
    read_about,
    save_evaluator,
)
from fl_privacy.models.pretrained.find_words import find_word_evaluator, name_of_words
from fl_privacy.models.pretrained.generator import (
    GeneratorShape,
    ImageDiscriminator,
    ImageGenerator,
    Provenance,
    image_fingerprints,
)
from fl_privacy.models.pretrained.generator_files import (
    TrainedGenerator,
    expect_generator,
    find_generator,
    load_generator,
    load_training,
    read_generator_header,
    save_generator,
    save_training,
)
from fl_privacy.models.pretrained.generator_training import GeneratorPlan, GeneratorTraining
from fl_privacy.models.pretrained.word_evaluator import (
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
    "GeneratorPlan",
    "GeneratorShape",
    "GeneratorTraining",
    "ImageDiscriminator",
    "ImageGenerator",
    "Progress",
    "Provenance",
    "TrainedGenerator",
    "WordBox",
    "WordEvaluator",
    "blend_with_noise",
    "expect_generator",
    "find_evaluator",
    "find_generator",
    "find_word_evaluator",
    "image_fingerprints",
    "load_evaluator",
    "load_generator",
    "load_training",
    "mix_with_random_words",
    "name_of_words",
    "noise_curve",
    "random_word_curve",
    "read_about",
    "read_generator_header",
    "save_evaluator",
    "save_generator",
    "save_training",
    "student_plan",
    "train_evaluator",
    "train_word_evaluator",
    "uniform_noise",
]
