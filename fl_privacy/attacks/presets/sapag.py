"""SAPAG."""

from collections.abc import Mapping
from typing import Literal

from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.initialization import Projection, named_start
from fl_privacy.attacks.gradient_inversion.objectives import GaussianKernel
from fl_privacy.attacks.gradient_inversion.settings import Compile, LabelPolicy
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.optimizers import LBFGS, Adam, Optimizer
from fl_privacy.errors import UserError


def sapag(
    *,
    iterations: int = 500,
    optimizer: Literal["lbfgs", "adamw"] = "lbfgs",
    lr: float | None = None,
    form: Literal["literal", "normalized"] = "normalized",
    bandwidth: float = 1.0,
    depth: Literal["constant", "linear", "geometric"] = "linear",
    last: float = 0.5,
    projection: Projection | None = None,
    restarts: int = 1,
    labels: LabelPolicy = "optimize",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """Self-adaptive privacy attack from gradients (Wang et al. 2020): Gaussian kernel.

    The paper brings images to [0, 1] after each iteration, by ``projection``. ``None`` does so with AdamW alone: L-BFGS
    takes the jump for curvature and stops at once (measured on LeNet; see ``experiments/RESULTS.md``).

    L-BFGS with rate 1 and 500 iterations on LeNet, AdamW with rate 1e-3 and 20,000 on ResNet-18, from N(0, 1) or a
    constant. ``form``, ``bandwidth``, ``depth`` and ``last`` are those of
    :class:`fl_privacy.attacks.gradient_inversion.objectives.GaussianKernel`; the printed formula is ``form="literal"``.
    """
    if optimizer not in ("lbfgs", "adamw"):
        raise UserError(f"attack.optimizer is expected to be lbfgs or adamw, but got {optimizer!r}.")
    engine: Optimizer = (
        LBFGS(lr=1.0 if lr is None else lr)
        if optimizer == "lbfgs"
        else Adam(lr=1e-3 if lr is None else lr, weight_decay=0.01)
    )
    return GradientInversion(
        objective=GaussianKernel(form=form, bandwidth=bandwidth, depth=depth, last=last, layers=layers or {}),
        optimizer=engine,
        projection=projection or ("none" if optimizer == "lbfgs" else "clamp"),
        iterations=iterations,
        restarts=restarts,
        labels=labels,
        start=named_start(start),
        local_steps=local_steps,
        compile=compile,
        dtype=dtype,
        device=device,
    )
