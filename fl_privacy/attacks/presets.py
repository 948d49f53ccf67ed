"""Published attacks by descent on a distance of gradients: DLG and its descendants, Inverting Gradients, ATS, SAPAG.

Each names its paper's objective, optimizer, priors and iterations; ``options`` are those of all of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Unpack, get_args

from fl_privacy.attacks.gradient_inversion import GradientInversion, Space
from fl_privacy.attacks.gradient_inversion.objectives import L1, L2, Cosine, GaussianKernel
from fl_privacy.attacks.gradient_inversion.priors import (
    BatchNormStatistics,
    ColorRange,
    GroupConsistency,
    ImageNorm,
    TotalVariation,
)
from fl_privacy.attacks.optimizers import LBFGS, Adam, CosineRate, GradientDescent, Optimizer, StepDecay
from fl_privacy.attacks.optimizers.first_order import Sign
from fl_privacy.attacks.optimizers.lbfgs import LineSearch
from fl_privacy.attacks.preset_options import GradientOptions, takes, vary
from fl_privacy.checks import one_of
from fl_privacy.errors import UserError

Variant = Literal["paper", "code"]
"""Where paper and program differ."""

_STD = 0.25
_SPACE = Space(mean=0.5, std=_STD)
"""Of images normalized by values that stand for those of natural images."""


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
    """Build Inverting Gradients (Geiping et al. 2020): cosine, total variation, signed Adam, clamped.

    The paper optimizes images normalized by their data's mean and standard deviation; ``mean`` and ``std`` stand for
    those of natural images. Its total variation is that of normalized images, with the weight 1e-4 (on
    pixels it is the weight over ``std``); 0.1 is the default of the published code.

    Variants of later work: ``per_layer`` (mean of the tensors' cosine distances), ``sign="soft"``, ``noise`` (standard
    deviation of noise on the pixels' gradient), ``isotropic`` (total variation by Euclidean lengths), and instead of
    clamping ``projection="minmax"``, or ``"none"`` with the penalty ``color_range`` on pixels outside [0, 1].
    """
    smooth = TotalVariation(weight=total_variation / std, isotropic=isotropic)
    published = GradientInversion(
        objective=Cosine(per_layer=per_layer),
        optimizer=Adam(lr=lr, sign=sign, schedule=StepDecay()),
        priors=(smooth, ColorRange(weight=color_range)) if color_range else (smooth,),
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
    """Build GradInversion (Yin et al. 2021): L2 with total variation, norm, batch-norm and group priors, Adam.

    With ``restarts`` above 1 the attempts run side by side and are held together by ``consistency``. ``first_layer`` is
    the factor of public implementations on the batch-norm term of the first layer (1 in the paper). ``noise`` is the
    standard deviation of noise on the pixels' gradient: the paper adds 0.2 of the learning rate, public implementations
    0.01 of it or none. ``isotropic``, ``color_range`` and ``projection`` are those of :func:`inverting_gradients`.
    Refiner's comparison uses ``lr=0.01, iterations=4000``.
    """
    published = GradientInversion(
        objective=L2(),
        optimizer=Adam(lr=lr, schedule=CosineRate(warmup=warmup)),
        priors=(
            TotalVariation(weight=total_variation, isotropic=isotropic),
            ImageNorm(weight=image_norm),
            BatchNormStatistics(weight=batch_norm, first=first_layer),
            *([ColorRange(weight=color_range)] if color_range else []),
        ),
        projection="clamp",
        iterations=20_000,
    )
    attack = vary(published, options)
    if attack.restarts == 1:
        return attack
    return replace(attack, priors=(*attack.priors, GroupConsistency(weight=consistency)))


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
    """Build an attack "optimizer + distance" of ATS (Gao et al. 2021, Table 4; 2023, Section 5.1).

    Adam and SGD are as "Inverting Gradients" has them: signed, 4800 iterations with step decay, total variation 1e-4,
    clamped. SGD is that of its code, learning rate 0.01 with Nesterov momentum, in both variants.

    L-BFGS differs. ``paper``: "the same setting" as DLG (learning rate 1, neither total variation nor clamping), 300
    iterations, the best of 16 by its own loss. ``code`` is the authors' program: learning rate 1e-4 on normalized
    images; with the cosine signed and clamped, total variation 1e-4, 300 iterations, 16 restarts; with L2 total
    variation 1e-3, 50 iterations, 2 restarts. So small a rate hardly leaves the noise that it starts from.

    Args:
        variant: of L-BFGS.
        optimizer: of the images.
        distance: of gradients.
        total_variation: weight, of images normalized by mean 0.5 and standard deviation 0.25; ``None`` is the
            variant's.
        options: as for all attacks.

    Raises:
        UserError: there is no such optimizer, distance or variant.
    """
    if optimizer not in ("lbfgs", *_SIGNED) or distance not in _DISTANCES or variant not in get_args(Variant):
        raise UserError(
            f"ATS's attacks combine lbfgs, {', '.join(_SIGNED)} with {', '.join(_DISTANCES)} as in the paper or code,"
            f" but got {optimizer!r}, {distance!r} and {variant!r}."
        )
    published = inverting_gradients()
    if optimizer in _SIGNED:
        published = replace(published, optimizer=_SIGNED[optimizer])
    elif variant == "paper":
        published = GradientInversion(optimizer=LBFGS(), iterations=300, restarts=16)
    elif distance == "l2":
        blurred = TotalVariation(weight=1e-3 / _STD)
        published = GradientInversion(
            optimizer=LBFGS(lr=1e-4), space=_SPACE, priors=(blurred,), iterations=50, restarts=2
        )
    else:
        published = replace(published, optimizer=LBFGS(lr=1e-4, sign="hard"), iterations=300, restarts=16)
    published = replace(published, objective=_DISTANCES[distance]())
    if total_variation is not None:
        weight = total_variation / _STD
        published = replace(published, priors=(TotalVariation(weight=weight),) if weight else ())
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
    """Build DLG (Zhu et al. 2019): L2, L-BFGS, image and soft label from N(0, 1) together.

    ``enough`` and ``accept`` are shares of the observed gradient's squared norm: below the first a victim has finished,
    below the second it is not attacked again. The default of ``enough`` is about the 1e-6 at which the published code
    of iDLG stops on its LeNet. All steps have the length ``lr``, as published, unless ``line_search`` asks for others.
    Later work adds ``total_variation`` (FDL-PP, Gu et al. 2021, Algorithm 2). ``relative`` divides the loss by the
    observed gradient's squared norm, without which L-BFGS stops at once where a trained model has small gradients.
    """
    published = GradientInversion(
        objective=L2(relative=relative),
        optimizer=LBFGS(lr=lr, history=history, line_search=line_search),
        priors=(TotalVariation(weight=total_variation),) if total_variation else (),
        enough=1e-9,
        accept=1e-7,
        labels="optimize",
    )
    return vary(published, options)


@takes(GradientOptions)
def idlg(
    *,
    lr: float = 1.0,
    history: int = 100,
    line_search: LineSearch = "none",
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build iDLG (Zhao et al. 2020): DLG with the label inferred from the output layer's gradient."""
    published = replace(dlg(lr=lr, history=history, line_search=line_search), labels="auto")
    return vary(published, options)


@takes(GradientOptions)
def adam_dlg(*, lr: float = 1e-3, weight_decay: float = 0.01, **options: Unpack[GradientOptions]) -> GradientInversion:
    """Build DLG with AdamW, to which SAPAG compares itself (Wang et al. 2020)."""
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
    per: Literal["tensor", "layer"] = "tensor",
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Build SAPAG, the self-adaptive privacy attack from gradients (Wang et al. 2020): Gaussian kernel.

    The paper brings images to [0, 1] after each iteration, by ``projection``; it is so with AdamW alone: L-BFGS takes
    the jump for curvature and stops at once (measured on LeNet; see ``experiments/RESULTS.md``).

    A ``bandwidth`` of 1 leaves the kernel saturated at the start under normal weights, where a guess's gradient is
    several times as long as the observed one. AdamW's steps do not shrink with the slope, and it keeps 1. L-BFGS ends
    there, so it has 10, and smaller tolerances than suit squared gradients: losses are shares of a saturated kernel's.

    L-BFGS with rate 1 and 500 iterations on LeNet, AdamW with rate 1e-3 and 20,000 on ResNet-18, from N(0, 1) or a
    constant. ``form``, ``bandwidth``, ``depth``, ``last`` and ``per`` are those of
    :class:`fl_privacy.attacks.gradient_inversion.objectives.GaussianKernel`; the printed formula is ``form="literal"``.
    """
    one_of("attack.optimizer", optimizer, ("lbfgs", "adamw"))
    one_of("attack.per", per, ("tensor", "layer"))
    width = bandwidth if bandwidth is not None else 10.0 if optimizer == "lbfgs" else 1.0
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
