"""Pretrained networks in files: Refiner's evaluation network, and image generators."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.models.pretrained.evaluator import (
        EvaluationNetwork as EvaluationNetwork,
        EvaluatorPlan as EvaluatorPlan,
        Progress as Progress,
        blend_with_noise as blend_with_noise,
        noise_curve as noise_curve,
        student_plan as student_plan,
        train_evaluator as train_evaluator,
        uniform_noise as uniform_noise,
    )
    from fl_privacy.models.pretrained.evaluator_files import (
        CachedEvaluator as CachedEvaluator,
        Evaluator as Evaluator,
        find_evaluator as find_evaluator,
        find_word_evaluator as find_word_evaluator,
        load_evaluator as load_evaluator,
        name_of_words as name_of_words,
        read_about as read_about,
        save_evaluator as save_evaluator,
    )
    from fl_privacy.models.pretrained.generator import (
        GeneratorShape as GeneratorShape,
        ImageDiscriminator as ImageDiscriminator,
        ImageGenerator as ImageGenerator,
        Provenance as Provenance,
        TrainedGenerator as TrainedGenerator,
        expect_generator as expect_generator,
        find_generator as find_generator,
        image_fingerprints as image_fingerprints,
        load_generator as load_generator,
        load_training as load_training,
        read_generator_header as read_generator_header,
        save_generator as save_generator,
        save_training as save_training,
    )
    from fl_privacy.models.pretrained.generator_training import (
        GeneratorPlan as GeneratorPlan,
        GeneratorTraining as GeneratorTraining,
    )
    from fl_privacy.models.pretrained.word_evaluator import (
        TEXTS as TEXTS,
        WordBox as WordBox,
        WordEvaluator as WordEvaluator,
        mix_with_random_words as mix_with_random_words,
        random_word_curve as random_word_curve,
        train_word_evaluator as train_word_evaluator,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
