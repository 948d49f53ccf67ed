"""The published attacks: what each puts into :class:`GradientInversion`, with the defaults of its paper."""

from collections.abc import Mapping
from typing import Literal

from fl_privacy.attacks.engine import GradientInversion, LabelPolicy
from fl_privacy.attacks.objectives import L2, Cosine
from fl_privacy.attacks.optimizers import LBFGS, Adam, StepDecay
from fl_privacy.attacks.priors import TotalVariation
from fl_privacy.attacks.space import Space
from fl_privacy.attacks.starts import Normal

Layers = Mapping[str, float] | None
Dtype = Literal["float32", "float64"]


def dlg(
    *,
    iterations: int = 300,
    restarts: int = 1,
    lr: float = 1.0,
    history: int = 100,
    enough: float = 1e-9,
    accept: float = 1e-7,
    layers: Layers = None,
    dtype: Dtype = "float32",
    device: str | None = None,
) -> GradientInversion:
    """Deep leakage from gradients (Zhu et al. 2019): L2, L-BFGS, image and soft label from N(0, 1) together."""
    return GradientInversion(
        objective=L2(layers=layers or {}),
        optimizer=LBFGS(lr=lr, history=history),
        labels="optimize",
        iterations=iterations,
        restarts=restarts,
        enough=enough,
        accept=accept,
        dtype=dtype,
        device=device,
    )


def idlg(
    *,
    iterations: int = 300,
    restarts: int = 1,
    lr: float = 1.0,
    history: int = 100,
    enough: float = 1e-9,
    accept: float = 1e-7,
    labels: LabelPolicy = "auto",
    layers: Layers = None,
    dtype: Dtype = "float32",
    device: str | None = None,
) -> GradientInversion:
    """Improved deep leakage (Zhao et al. 2020): DLG with the label read from the output layer's gradient."""
    return GradientInversion(
        objective=L2(layers=layers or {}),
        optimizer=LBFGS(lr=lr, history=history),
        labels=labels,
        iterations=iterations,
        restarts=restarts,
        enough=enough,
        accept=accept,
        dtype=dtype,
        device=device,
    )


def inverting_gradients(
    *,
    iterations: int = 4800,
    restarts: int = 1,
    lr: float = 0.1,
    total_variation: float = 1e-4,
    mean: float = 0.5,
    std: float = 0.25,
    labels: LabelPolicy = "auto",
    layers: Layers = None,
    dtype: Dtype = "float32",
    device: str | None = None,
) -> GradientInversion:
    """Inverting gradients (Geiping et al. 2020): cosine and total variation, signed Adam with step decay, clamped.

    The paper optimizes images normalized by their data's mean and standard deviation; ``mean`` and ``std`` stand for
    those of natural images. Its total variation is that of normalized images.
    """
    return GradientInversion(
        objective=Cosine(layers=layers or {}),
        optimizer=Adam(lr=lr, sign="hard", schedule=StepDecay()),
        labels=labels,
        priors=(TotalVariation(weight=total_variation / std),),
        start=Normal(),
        space=Space(mean=mean, std=std),
        projection="clamp",
        iterations=iterations,
        restarts=restarts,
        dtype=dtype,
        device=device,
    )
