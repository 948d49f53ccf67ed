"""Attacks that search images of a trained generator."""

from typing import Literal, Unpack

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.generator_prior import Generated, NamedGenerator, Penalty
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.attacks.optimizers import Adam, EvolutionStrategy, StepDecay
from fl_privacy.attacks.preset_options import GenerativeOptions, takes, vary
from fl_privacy.checks import number, one_of, whole
from fl_privacy.models.pretrained.generator_files import expect_generator


@takes(GenerativeOptions, depending=("iterations",))
def ggl(
    *,
    generator: str | None = None,
    optimizer: Literal["adam", "cma"] = "adam",
    lr: float = 0.01,
    population: int = 50,
    deviation: float = 1.0,
    penalty: Penalty = "kl",
    weight: float = 1e-3,
    relative: bool = True,
    **options: Unpack[GenerativeOptions],
) -> GradientInversion:
    """Build generative gradient leakage (Li et al. 2022): search the latents whose images fit the update.

    The objective is the squared L2 distance of gradients plus a penalty on latents. Adam takes 4,000 iterations
    (Refiner, Fan et al. 2025); CMA-ES 500, as in GGL's code. A defense that the update shows (zeros, few levels, empty
    columns, else its norm) is applied to the guess.

    Args:
        generator: file of ``fl-privacy train-generator``, or ``faces`` for the one in the package gan-face-generate.
        optimizer: ``adam``, or ``cma``, which needs that package.
        lr: learning rate of Adam; 0.01 as in Refiner.
        population: candidates of CMA-ES in each iteration.
        deviation: standard deviation of the first ones.
        penalty: ``kl`` or ``norm``; see :data:`fl_privacy.attacks.gradient_inversion.generator_prior.Penalty`.
        weight: weight of the penalty, at least 0; the authors' 0.1 is for distances that are not relative, and
            otherwise keeps latents from fitting (``experiments/RESULTS.md``).
        relative: ``True`` divides the distance by the observed squared norm, so that a weight fits every model.
    """
    one_of("attack.optimizer", optimizer, ("adam", "cma"))
    one_of("attack.penalty", penalty, ("kl", "norm"))
    number("attack.weight", weight, at_least=0, example=1e-3)
    expect_generator(generator)
    strategy = EvolutionStrategy(population=population, deviation=deviation)
    if optimizer == "cma":
        strategy.expect_package()
    published = GradientInversion(
        objective=L2(relative=relative),
        optimizer=Adam(lr=lr) if optimizer == "adam" else strategy,
        source=Generated(generator=NamedGenerator(generator), weight=weight, penalty_kind=penalty),
        evident=True,
        iterations=4000 if optimizer == "adam" else 500,
    )
    return vary(published, options)


@takes(GenerativeOptions)
def gifd(
    *,
    generator: str | None = None,
    layers: int = 2,
    reach: float = 0.3,
    lr: float = 0.1,
    total_variation: float = 0.0,
    **options: Unpack[GenerativeOptions],
) -> GradientInversion:
    """Build GIFD (Fang et al. 2023): search latents first, then features within the generator.

    After the latents, each layer's output is optimized in turn, within an l1 ball around the result; the images of the
    stage that fits best are kept. Cosine distance, Adam with a falling rate, ``iterations`` a stage.

    Args:
        generator: file, as for :func:`ggl`.
        layers: number of layers optimized; 0 stops at the latents.
        reach: radius of the ball, in shares of the l1 norm of an image's features, at least 0. The authors' radii fit
            their generators.
        lr: learning rate of Adam.
        total_variation: weight; if the angle between gradients is small, even 1e-4 leaves nothing but gray.
    """
    whole("attack.layers", layers, at_least=0, example=2)
    number("attack.reach", reach, at_least=0, example=0.3)
    expect_generator(generator)
    published = GradientInversion(
        objective=Cosine(),
        optimizer=Adam(lr=lr, schedule=StepDecay()),
        priors=(TotalVariation(weight=total_variation),) if total_variation else (),
        source=Generated(generator=NamedGenerator(generator), deeper=layers, reach=reach),
        evident=True,
        projection="clamp",
        iterations=1000,
    )
    return vary(published, options)
