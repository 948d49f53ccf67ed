"""Inverting gradients."""

from collections.abc import Mapping
from typing import Literal

from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.initialization import Projection, Space, named_start
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.priors import ColorRange, Prior, TotalVariation
from fl_privacy.attacks.gradient_inversion.settings import Compile, LabelPolicy
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.optimizers import Adam, StepDecay
from fl_privacy.attacks.optimizers.first_order import Sign


def inverting_gradients(
    *,
    iterations: int = 4800,
    lr: float = 0.1,
    total_variation: float = 1e-4,
    per_layer: bool = False,
    sign: Sign = "hard",
    noise: float = 0.0,
    isotropic: bool = False,
    color_range: float = 0.0,
    projection: Projection = "clamp",
    mean: float = 0.5,
    std: float = 0.25,
    restarts: int = 1,
    labels: LabelPolicy = "auto",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """Inverting gradients (Geiping et al. 2020): cosine and total variation, signed Adam with step decay, clamped.

    The paper optimizes images normalized by their data's mean and standard deviation; ``mean`` and ``std`` stand for
    those of natural images. Its total variation is that of normalized images, with the weight 1e-4; 0.1 is the default
    of the published code.

    Variants of later work: ``per_layer`` (mean of the tensors' cosine distances), ``sign="soft"``, ``noise`` (standard
    deviation of noise on the pixels' gradient), ``isotropic`` (total variation by Euclidean lengths), and instead of
    clamping ``projection="minmax"``, or ``"none"`` with the penalty ``color_range`` on pixels outside [0, 1].
    """
    priors: tuple[Prior, ...] = (TotalVariation(weight=total_variation / std, isotropic=isotropic),)
    if color_range:
        priors = (*priors, ColorRange(weight=color_range))
    return GradientInversion(
        objective=Cosine(per_layer=per_layer, layers=layers or {}),
        optimizer=Adam(lr=lr, sign=sign, schedule=StepDecay()),
        priors=priors,
        space=Space(mean=mean, std=std),
        projection=projection,
        noise=noise,
        iterations=iterations,
        restarts=restarts,
        labels=labels,
        start=named_start(start),
        local_steps=local_steps,
        compile=compile,
        dtype=dtype,
        device=device,
    )
