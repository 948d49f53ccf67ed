"""GradInversion."""

from collections.abc import Mapping
from typing import Literal

from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.initialization import Projection, named_start
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.priors import (
    BatchNormStatistics,
    ColorRange,
    GroupConsistency,
    ImageNorm,
    Prior,
    TotalVariation,
)
from fl_privacy.attacks.gradient_inversion.settings import Compile, LabelPolicy
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.optimizers import Adam, CosineRate


def grad_inversion(
    *,
    iterations: int = 20_000,
    lr: float = 0.1,
    warmup: int = 50,
    total_variation: float = 1e-4,
    isotropic: bool = False,
    image_norm: float = 1e-6,
    batch_norm: float = 0.1,
    first_layer: float = 10.0,
    consistency: float = 1e-2,
    noise: float = 0.0,
    color_range: float = 0.0,
    projection: Projection = "clamp",
    restarts: int = 1,
    labels: LabelPolicy = "auto",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """See through gradients (Yin et al. 2021): L2 with total variation, norm, batch-norm and group priors, Adam.

    With ``restarts`` above 1 the attempts run side by side and are held together by ``consistency``. ``first_layer`` is
    the factor of public implementations on the batch-norm term of the first layer (1 in the paper). ``noise`` is the
    standard deviation of noise on the pixels' gradient: the paper adds 0.2 of the learning rate, public implementations
    0.01 of it or none. ``isotropic``, ``color_range`` and ``projection`` are those of :func:`inverting_gradients`.
    Refiner's comparison uses ``lr=0.01, iterations=4000``.
    """
    priors: tuple[Prior, ...] = (
        TotalVariation(weight=total_variation, isotropic=isotropic),
        ImageNorm(weight=image_norm),
        BatchNormStatistics(weight=batch_norm, first=first_layer),
    )
    if color_range:
        priors = (*priors, ColorRange(weight=color_range))
    if restarts > 1:
        priors = (*priors, GroupConsistency(weight=consistency))
    return GradientInversion(
        objective=L2(layers=layers or {}),
        optimizer=Adam(lr=lr, schedule=CosineRate(warmup=warmup)),
        priors=priors,
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
