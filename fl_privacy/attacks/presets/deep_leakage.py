"""Deep leakage from gradients and its direct descendants."""

from collections.abc import Mapping
from typing import Literal

from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.initialization import named_start
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.attacks.gradient_inversion.settings import Compile, LabelPolicy
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.optimizers import LBFGS, Adam
from fl_privacy.attacks.optimizers.lbfgs import LineSearch


def dlg(
    *,
    iterations: int = 300,
    lr: float = 1.0,
    history: int = 100,
    line_search: LineSearch = "none",
    enough: float = 1e-9,
    accept: float = 1e-7,
    total_variation: float = 0.0,
    relative: bool = False,
    restarts: int = 1,
    labels: LabelPolicy = "optimize",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """Deep leakage from gradients (Zhu et al. 2019): L2, L-BFGS, image and soft label from N(0, 1) together.

    ``enough`` and ``accept`` are shares of the observed gradient's squared norm: below the first a victim has finished,
    below the second it is not attacked again. The default of ``enough`` is about the 1e-6 at which the published code
    of iDLG stops on its LeNet. All steps have the length ``lr``, as published, unless ``line_search`` asks for others.
    Later work adds ``total_variation`` (FDL-PP, Gu et al. 2021, Algorithm 2). ``relative`` divides the loss by the
    observed gradient's squared norm, without which L-BFGS stops at once where a trained model has small gradients.
    """
    return GradientInversion(
        objective=L2(layers=layers or {}, relative=relative),
        optimizer=LBFGS(lr=lr, history=history, line_search=line_search),
        priors=(TotalVariation(weight=total_variation),) if total_variation else (),
        enough=enough,
        accept=accept,
        iterations=iterations,
        restarts=restarts,
        labels=labels,
        start=named_start(start),
        local_steps=local_steps,
        compile=compile,
        dtype=dtype,
        device=device,
    )


def idlg(
    *,
    iterations: int = 300,
    lr: float = 1.0,
    history: int = 100,
    line_search: LineSearch = "none",
    enough: float = 1e-9,
    accept: float = 1e-7,
    restarts: int = 1,
    labels: LabelPolicy = "auto",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """Improved deep leakage (Zhao et al. 2020): DLG with the label read from the output layer's gradient."""
    return GradientInversion(
        objective=L2(layers=layers or {}),
        optimizer=LBFGS(lr=lr, history=history, line_search=line_search),
        enough=enough,
        accept=accept,
        iterations=iterations,
        restarts=restarts,
        labels=labels,
        start=named_start(start),
        local_steps=local_steps,
        compile=compile,
        dtype=dtype,
        device=device,
    )


def adam_dlg(
    *,
    iterations: int = 20_000,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    restarts: int = 1,
    labels: LabelPolicy = "optimize",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """DLG with AdamW, as SAPAG compares itself with (Wang et al. 2020)."""
    return GradientInversion(
        objective=L2(layers=layers or {}),
        optimizer=Adam(lr=lr, weight_decay=weight_decay),
        iterations=iterations,
        restarts=restarts,
        labels=labels,
        start=named_start(start),
        local_steps=local_steps,
        compile=compile,
        dtype=dtype,
        device=device,
    )
