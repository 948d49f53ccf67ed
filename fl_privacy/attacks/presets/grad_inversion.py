"""GradInversion."""

from collections.abc import Mapping
from typing import Literal

from fl_privacy.attacks.compiled import Compile
from fl_privacy.attacks.engine import GradientInversion, LabelPolicy
from fl_privacy.attacks.objectives import L2
from fl_privacy.attacks.optimizers import Adam, CosineRate
from fl_privacy.attacks.priors import BatchNormStatistics, GroupConsistency, ImageNorm, Prior, TotalVariation
from fl_privacy.attacks.starts import named_start
from fl_privacy.attacks.targets import LocalSteps


def grad_inversion(
    *,
    iterations: int = 20_000,
    lr: float = 0.1,
    warmup: int = 50,
    total_variation: float = 1e-4,
    image_norm: float = 1e-6,
    batch_norm: float = 0.1,
    consistency: float = 1e-2,
    noise: float = 0.0,
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

    Refiner's comparison uses ``lr=0.01, iterations=4000``. With ``restarts`` above 1 the attempts run side by side and
    are held together by ``consistency``. ``noise`` is the standard deviation of noise on the pixels' gradient.
    """
    priors: tuple[Prior, ...] = (
        TotalVariation(weight=total_variation),
        ImageNorm(weight=image_norm),
        BatchNormStatistics(weight=batch_norm),
    )
    if restarts > 1:
        priors = (*priors, GroupConsistency(weight=consistency))
    return GradientInversion(
        objective=L2(layers=layers or {}),
        optimizer=Adam(lr=lr, schedule=CosineRate(warmup=warmup)),
        priors=priors,
        projection="clamp",
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
