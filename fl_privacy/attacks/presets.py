"""Published attacks by descent on a distance of gradients."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Unpack, get_args

from fl_privacy.attacks.feature_inversion import ModelInversion, Recovery
from fl_privacy.attacks.gradient_inversion import GradientInversion, Space, priors
from fl_privacy.attacks.gradient_inversion.generator_prior import Generated, NamedGenerator, Penalty
from fl_privacy.attacks.gradient_inversion.objectives import L1, L2, Cosine, GaussianKernel, WeightedL2L1
from fl_privacy.attacks.gradient_inversion.settings import Rearranging, Uniform
from fl_privacy.attacks.optimizers import (
    LBFGS,
    Adam,
    CosineRate,
    EvolutionStrategy,
    GradientDescent,
    Optimizer,
    StairDecay,
    StepDecay,
)
from fl_privacy.attacks.optimizers.first_order import Sign
from fl_privacy.attacks.optimizers.lbfgs import LineSearch
from fl_privacy.attacks.preset_options import FeatureOptions, GenerativeOptions, GradientOptions, takes, vary
from fl_privacy.checks import number, one_of, whole
from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.generator import expect_generator

Variant = Literal["paper", "code"]  # source of the settings if paper and program differ
_STD = 0.25
_SPACE = Space(mean=0.5, std=_STD)  # images normalized by values typical of natural images


@takes(GradientOptions)
def inverting_gradients(
    *,
    lr: float = 0.1,
    total_variation: float = 1e-4,
    per_layer: bool = False,
    sign: Sign = "hard",
    isotropic: bool = False,
    color_range: float = 0.0,
    mean: float = _SPACE.mean,
    std: float = _SPACE.std,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build Inverting Gradients (Geiping et al. 2020): signed Adam on the cosine distance of gradients.

    As in the paper, images are optimized in normalized form and clamped to [0, 1].

    Args:
        total_variation: weight for normalized images; the published code's default is 0.1.
        per_layer: ``True`` takes the mean of the tensors' cosine distances.
        sign: treatment of the pixels' gradient: ``hard`` takes its sign, ``soft`` a tanh instead.
        isotropic: ``True`` takes Euclidean total variation.
        color_range: weight of a penalty on pixels outside [0, 1], for use with ``projection="none"``.
        mean, std: normalization of images; natural images' by default.
        options: :class:`GradientOptions`; ``noise`` is the standard deviation of noise on the pixels' gradient.
    """
    smooth = priors.TotalVariation(weight=total_variation / std, isotropic=isotropic)
    published = GradientInversion(
        objective=Cosine(per_layer=per_layer),
        optimizer=Adam(lr=lr, sign=sign, schedule=StepDecay()),
        priors=(smooth, priors.ColorRange(weight=color_range)) if color_range else (smooth,),
        space=Space(mean=mean, std=std),
        projection="clamp",
        iterations=4800,
    )
    return vary(published, options)


@takes(GradientOptions)
def grad_inversion(
    *,
    lr: float = 0.1,
    warmup: int = 50,
    total_variation: float = 1e-4,
    isotropic: bool = False,
    image_norm: float = 1e-6,
    batch_norm: float = 0.1,
    first_layer: float = 10.0,
    consistency: float = 1e-2,
    color_range: float = 0.0,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build GradInversion (Yin et al. 2021): Adam on the L2 distance of gradients with four image priors.

    In the paper of the defense Refiner, it runs with ``lr=0.01, iterations=4000``.

    Args:
        warmup: number of first iterations, in which the learning rate rises.
        total_variation, image_norm, batch_norm: weights of three priors.
        first_layer: factor on the batch-norm prior of the first layer (1 in the paper).
        consistency: weight of the fourth prior, used with several ``restarts``: distance from the attempts' mean.
        isotropic, color_range: see :func:`inverting_gradients`.
        options: :class:`GradientOptions`; ``noise`` is 0.2 of the learning rate in the paper.
    """
    published = GradientInversion(
        objective=L2(),
        optimizer=Adam(lr=lr, schedule=CosineRate(warmup=warmup)),
        priors=(
            priors.TotalVariation(weight=total_variation, isotropic=isotropic),
            priors.ImageNorm(weight=image_norm),
            priors.BatchNormStatistics(weight=batch_norm, first=first_layer),
            *([priors.ColorRange(weight=color_range)] if color_range else []),
        ),
        projection="clamp",
        iterations=20_000,
    )
    attack = vary(published, options)
    if attack.restarts == 1:
        return attack
    return replace(attack, priors=(*attack.priors, priors.GroupConsistency(weight=consistency)))


_DISTANCES: Mapping[str, type[L1] | type[L2] | type[Cosine]] = {"l1": L1, "l2": L2, "cosine": Cosine}
_SIGNED: Mapping[str, Optimizer] = {
    "adam": Adam(lr=0.1, sign="hard", schedule=StepDecay()),
    "sgd": GradientDescent(lr=0.01, nesterov=True, sign="hard", schedule=StepDecay()),
}


@takes(GradientOptions, depending=("iterations", "restarts", "projection"))
def ats_attack(
    *,
    variant: Variant = "paper",
    optimizer: Literal["lbfgs", "adam", "sgd"] = "adam",
    distance: Literal["l1", "l2", "cosine"] = "cosine",
    total_variation: float | None = None,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build an attack with which the authors of ATS, a defense by image transformations, tested it.

    It minimizes a ``distance`` of gradients by an ``optimizer`` (Gao et al. 2021, Table 4; 2023, Section 5.1):

    - ``adam``, ``sgd``: signed, as in "Inverting Gradients": 4800 iterations with step decay, total variation 1e-4,
      clamped; SGD with learning rate 0.01 and Nesterov momentum.
    - ``lbfgs``, ``variant="paper"``: "the same setting" as DLG: learning rate 1, neither total variation nor clamping,
      300 iterations, the best of 16 restarts.
    - ``lbfgs``, ``variant="code"``, ``l2``: learning rate 1e-4 on normalized images, which hardly leaves its start,
      total variation 1e-3, 50 iterations, 2 restarts.
    - the same with other distances: signed, clamped, total variation 1e-4, 300 iterations, 16 restarts.

    ``total_variation`` is a weight for images normalized by mean 0.5 and standard deviation 0.25; ``None`` takes the
    variant's. Other optimizers, distances or variants raise ``UserError``.
    """
    if optimizer not in ("lbfgs", *_SIGNED) or distance not in _DISTANCES or variant not in get_args(Variant):
        raise UserError(
            f"ATS's attacks are expected to join lbfgs, {', '.join(_SIGNED)} with {', '.join(_DISTANCES)} (paper, code)"
            f", but got {optimizer!r}, {distance!r} and {variant!r}; choose one of each."
        )
    published = inverting_gradients()
    if optimizer in _SIGNED:
        published = replace(published, optimizer=_SIGNED[optimizer])
    elif variant == "paper":
        published = GradientInversion(optimizer=LBFGS(), iterations=300, restarts=16)
    elif distance == "l2":
        blurred, slow = priors.TotalVariation(weight=1e-3 / _STD), LBFGS(lr=1e-4)
        published = GradientInversion(optimizer=slow, space=_SPACE, priors=(blurred,), iterations=50, restarts=2)
    else:
        published = replace(published, optimizer=LBFGS(lr=1e-4, sign="hard"), iterations=300, restarts=16)
    published = replace(published, objective=_DISTANCES[distance]())
    if total_variation is not None:
        weight = total_variation / _STD
        published = replace(published, priors=(priors.TotalVariation(weight=weight),) if weight else ())
    return vary(published, options)


@takes(GradientOptions)
def dlg(
    *,
    lr: float = 1.0,
    history: int = 100,
    line_search: LineSearch = "none",
    total_variation: float = 0.0,
    relative: bool = False,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build DLG (Zhu et al. 2019): L-BFGS on L2 distance, over image and soft label.

    Both start from N(0, 1). The options ``enough`` and ``accept`` are shares of the observed gradient's squared norm: a
    descent ends at a loss below the first; a victim with a loss below the second gets no further restart. Later work
    adds ``total_variation`` (FDL-PP, Gu et al. 2021, Algorithm 2). ``relative`` divides the loss by the observed
    squared norm, since small gradients stop L-BFGS.
    """
    published = GradientInversion(
        objective=L2(relative=relative),
        optimizer=LBFGS(lr=lr, history=history, line_search=line_search),
        priors=(priors.TotalVariation(weight=total_variation),) if total_variation else (),
        enough=1e-9,
        accept=1e-7,
        labels="optimize",
    )
    return vary(published, options)


@takes(GradientOptions)
def idlg(
    *, lr: float = 1.0, history: int = 100, line_search: LineSearch = "none", **options: Unpack[GradientOptions]
) -> GradientInversion:
    """Build iDLG (Zhao et al. 2020): DLG, by L-BFGS, with the label inferred from the output layer's gradient."""
    return vary(replace(dlg(lr=lr, history=history, line_search=line_search), labels="auto"), options)


@takes(GradientOptions)
def adam_dlg(*, lr: float = 1e-3, weight_decay: float = 0.01, **options: Unpack[GradientOptions]) -> GradientInversion:
    """Build DLG with AdamW, a baseline in the paper of SAPAG (Wang et al. 2020)."""
    published = GradientInversion(
        objective=L2(), optimizer=Adam(lr=lr, weight_decay=weight_decay), iterations=20_000, labels="optimize"
    )
    return vary(published, options)


@takes(GradientOptions, depending=("projection", "iterations"))
def sapag(
    *,
    optimizer: Literal["lbfgs", "adamw"] = "lbfgs",
    lr: float | None = None,
    form: Literal["literal", "normalized"] = "normalized",
    bandwidth: float | None = None,
    depth: Literal["constant", "linear", "geometric"] = "linear",
    last: float = 0.5,
    per: Literal["tensor", "layer", "element"] = "tensor",
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build SAPAG (Wang et al. 2020): match gradients under a Gaussian kernel.

    The paper projects images to [0, 1] after each iteration; here AdamW alone does, since L-BFGS would stop at once.

    Args:
        optimizer: ``lbfgs`` with 500 iterations (in the paper for LeNet), or ``adamw`` with 20,000 (for ResNet-18).
        lr: learning rate; ``None``: 1 for L-BFGS, 1e-3 for AdamW.
        bandwidth: factor on the kernel's squared width; ``None``: 1 for AdamW and ``per="element"``, else 10, since
            L-BFGS stops where the kernel is flat.
        form, per, depth, last: see :class:`fl_privacy.attacks.gradient_inversion.objectives.GaussianKernel`.
    """
    one_of("attack.optimizer", optimizer, ("lbfgs", "adamw"))
    one_of("attack.per", per, ("tensor", "layer", "element"))
    width = bandwidth if bandwidth is not None else 10.0 if optimizer == "lbfgs" and per != "element" else 1.0
    published = GradientInversion(
        objective=GaussianKernel(form=form, bandwidth=width, depth=depth, last=last, per=per),
        optimizer=LBFGS(lr=1.0 if lr is None else lr, tolerance_grad=1e-10, tolerance_change=1e-13),
        iterations=500,
        labels="optimize",
        reading="pseudo_inverse",
    )
    if optimizer == "adamw":
        adam = Adam(lr=1e-3 if lr is None else lr, weight_decay=0.01)
        published = replace(published, optimizer=adam, projection="clamp", iterations=20_000)
    return vary(published, options)


@takes(GradientOptions)
def tableak(
    *,
    lr: float = 0.06,
    sign: Sign = "hard",
    counted: bool = True,
    pooled: bool = True,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build TabLeak (Vero et al. 2023): signed Adam on cosine distance, softmax categories, median of attempts.

    Numbers stay within the schema's bounds, as in the authors' program. ``attack=tableak_paper`` has 1500 iterations,
    30 restarts and ``counted=False``; its softmax has temperature 1, which the authors' program cools.

    Args:
        sign: use of the gradient in Adam: ``hard`` takes its sign, ``soft`` a tanh, ``none`` the gradient itself.
        counted: ``True``, beyond the paper, infers how often each category occurs, leaves out absent ones and starts
            from these shares; a third of the paper's iterations then reconstructs more.
        pooled: ``True`` returns the median of the attempts, ``False`` the best one.
    """
    optimizer = Adam(lr=lr, sign=sign)
    published = GradientInversion(
        objective=Cosine(), optimizer=optimizer, counted=counted, pooled=pooled, iterations=500, restarts=10
    )
    return vary(published, options)


@takes(GradientOptions)
def tag(
    *,
    lr: float = 0.05,
    weight_decay: float = 0.01,
    clip: float = 0.05,
    alpha: float = 0.1,
    last: float = 0.1,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build TAG (Deng et al. 2021): AdamW on L2 plus L1 distance of gradients.

    Embeddings are optimized from normal noise and decoded to the nearest tokens. The rate (0.05, falling to zero), the
    1,000 iterations and the clipping are those of public implementations. The gradient of the embedding layer is
    ignored; ``attack=dager`` uses it.

    Args:
        lr, weight_decay: settings of AdamW; models from scratch leak more with ``lr=0.2, weight_decay=0.05``.
        clip: largest norm of the gradient with respect to a victim's embeddings, which are divided by the tokens' root
            mean square.
        alpha: weight of the L1 distance at the first tensor.
        last: factor on ``alpha`` at the last tensor.
    """
    number("attack.alpha", alpha, at_least=0, example=0.1)
    number("attack.last", last, at_least=0, example=0.1)
    published = GradientInversion(
        objective=WeightedL2L1(alpha=alpha, last=last),
        optimizer=Adam(lr=lr, weight_decay=weight_decay, clip=clip, schedule=CosineRate(warmup=20)),
        iterations=1000,
    )
    return vary(published, options)


@takes(GradientOptions)
def lamp(
    *,
    lr: float = 0.2,
    clip: float = 1e-5,
    distance: Literal["cosine", "l2_l1"] = "cosine",
    prior: float = 0.5,
    every: int = 75,
    burn_in: float = 1.0,
    tries: int = 200,
    starts: int = 1,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build LAMP (Balunovic et al. 2022): embeddings by descent, word order by a language model.

    Settings are those of the authors' code for BERT: cosine distance of each tensor, embeddings held at the tokens'
    mean length, and 2,000 iterations of Adam with a learning rate multiplied by 0.89 every 50. Unlike there, gradients
    are always clipped, decoded tokens are ordered instead of embeddings, orders are compared only after the descent,
    there is one start, and the language model is learned from public texts.

    Args:
        lr: learning rate of Adam, in units of the root mean square of embeddings.
        clip: largest norm of the gradient, as for :func:`tag`; infinite for none.
        distance: distance of gradients; ``l2_l1`` is TAG's with L1 weight 0.01, divided by the distance of a zero
            gradient.
        prior: weight of a text's mean negative log likelihood, relative to the typical difference between word orders.
        every, burn_in, tries, starts: see :class:`fl_privacy.attacks.gradient_inversion.settings.Rearranging`; on small
            models, the published ``burn_in=0.1`` and ``starts=500`` are worse.
    """
    one_of("attack.distance", distance, ("cosine", "l2_l1"))
    cosine = distance == "cosine"
    published = GradientInversion(
        objective=Cosine(per_layer=True) if cosine else WeightedL2L1(alpha=0.01, last=1.0, relative=True),
        optimizer=Adam(lr=lr, eps=1e-12, clip=clip, schedule=StairDecay(factor=0.89, every=50)),
        embedding_norm=2.0,
        moves=Rearranging(every=every, burn_in=burn_in, tries=tries, prior=prior, starts=starts),
        iterations=2000,
    )
    return vary(published, options)


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
    """Build generative gradient leakage (Li et al. 2022): search a generator's latents for matching images.

    The objective is the squared L2 distance of gradients plus a penalty on latents. Adam takes 4,000 iterations (as in
    the paper of the defense Refiner, Fan et al. 2025); CMA-ES 500, as in the authors' code. A defense that is inferred
    from the update is also applied to guessed gradients.

    Args:
        generator: file of ``fl-privacy train-generator``, or ``faces`` for the one in the package gan-face-generate.
        optimizer: ``adam``, or ``cma``, which needs that package.
        lr: learning rate of Adam.
        population, deviation: settings of CMA-ES, see :class:`fl_privacy.attacks.optimizers.EvolutionStrategy`.
        penalty: ``kl`` or ``norm``; see :data:`fl_privacy.attacks.gradient_inversion.generator_prior.Penalty`.
        weight: weight of the penalty, at least 0; the authors' 0.1 is for distances that are not relative.
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
    """Build GIFD (Fang et al. 2023): search a generator's latents, then its inner features.

    After the latents, each layer's output is optimized in turn, within an l1 ball around the result of the stage
    before; the images of the stage that fits best are kept. Each stage runs ``iterations`` of Adam on the cosine
    distance.

    Args:
        generator: file, as for :func:`ggl`.
        layers: number of layers optimized; 0 stops at the latents.
        reach: radius of the ball, in shares of the l1 norm of an image's features, at least 0.
        lr: first learning rate; it falls during a stage.
        total_variation: weight of total variation; if gradients differ little in angle, even 1e-4 leaves only gray.
    """
    whole("attack.layers", layers, at_least=0, example=2)
    number("attack.reach", reach, at_least=0, example=0.3)
    expect_generator(generator)
    published = GradientInversion(
        objective=Cosine(),
        optimizer=Adam(lr=lr, schedule=StepDecay()),
        priors=(priors.TotalVariation(weight=total_variation),) if total_variation else (),
        source=Generated(generator=NamedGenerator(generator), deeper=layers, reach=reach),
        evident=True,
        projection="clamp",
        iterations=1000,
    )
    return vary(published, options)


@takes(FeatureOptions)
def model_inversion(
    *,
    lr: float = 0.01,
    line_search: LineSearch = "none",
    total_variation: float | None = None,
    form: Literal["relative", "published"] = "relative",
    isotropic: bool = False,
    matching: Literal["l2", "cosine"] = "cosine",
    matching_iterations: int = 2000,
    matching_lr: float = 0.01,
    **options: Unpack[FeatureOptions],
) -> ModelInversion:
    """Build model inversion by a server and a colluding client (FDL-PP, Gu et al. 2021, Algorithm 3).

    A victim keeps its first layers private; a colluding client's stand in for them. The attack recovers their output,
    the features, and searches images with these features.

    Args:
        lr, line_search: settings of L-BFGS. The paper runs 1,500 or 2,000 iterations at 0.01 or 0.001; ``lr=1`` with
            ``line_search="strong_wolfe"`` reaches that minimum in a tenth of the iterations.
        total_variation: weight; ``None``: 1e-3, or 0.1 for ``form="published"``, for which the paper gives no value.
        form: ``published`` minimizes the squared distance of features plus the weighted sum of absolute differences of
            neighboring pixels. ``relative`` divides the distance by the features' squared norm, and takes the mean
            difference.
        isotropic: ``True`` takes Euclidean differences of pixels.
        matching: search for features that have no closed form: ``l2`` by L-BFGS, ``cosine`` by signed Adam.
        matching_iterations, matching_lr: settings of this search.
        options: :class:`FeatureOptions`; ``recover_at`` names a later module whose input the paper's Lemma 1 gives.
    """
    found = GradientInversion(objective=L2(), optimizer=LBFGS(), start=Uniform(), iterations=matching_iterations)
    if matching != "l2":
        adam = Adam(lr=matching_lr, sign="hard", schedule=StepDecay())
        found = replace(found, objective=Cosine(), optimizer=adam, projection="clamp")
    one_of("attack.form", form, ("relative", "published"))
    weight = total_variation if total_variation is not None else 0.1 if form == "published" else 1e-3
    prior = priors.TotalVariation(weight=weight, isotropic=isotropic, summed=form == "published")
    published = ModelInversion(
        recovery=Recovery(matching=found),
        optimizer=LBFGS(lr=lr, line_search=line_search),
        priors=(prior,) if weight else (),
        relative=form == "relative",
        iterations=1500,
        restarts=10,
    )
    return vary(published, options)
