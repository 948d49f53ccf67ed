"""The six attacks that ATS is measured against."""

from collections.abc import Mapping
from typing import Literal

from fl_privacy.attacks.compiled import Compile
from fl_privacy.attacks.engine import GradientInversion, LabelPolicy
from fl_privacy.attacks.objectives import L1, L2, Cosine, Objective
from fl_privacy.attacks.optimizers import LBFGS, Adam, GradientDescent, Optimizer, StepDecay
from fl_privacy.attacks.priors import TotalVariation
from fl_privacy.attacks.space import Space
from fl_privacy.attacks.starts import named_start
from fl_privacy.attacks.targets import LocalSteps
from fl_privacy.errors import UserError

_OPTIMIZERS: Mapping[str, Optimizer] = {
    "lbfgs": LBFGS(),
    "adam": Adam(lr=0.1, sign="hard", schedule=StepDecay()),
    "sgd": GradientDescent(lr=0.1, sign="hard", schedule=StepDecay()),
}
_DISTANCES: Mapping[str, type[L1] | type[L2] | type[Cosine]] = {"l1": L1, "l2": L2, "cosine": Cosine}


def ats(
    *,
    optimizer: Literal["lbfgs", "adam", "sgd"] = "adam",
    distance: Literal["l1", "l2", "cosine"] = "cosine",
    iterations: int = 4800,
    total_variation: float = 1e-4,
    restarts: int = 1,
    labels: LabelPolicy = "auto",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """An attack "optimizer + distance" of ATS (Gao et al. 2021, Table 4).

    L-BFGS runs 300 iterations with 16 restarts there; the others are signed, with step decay, total variation and
    clamping, as in "Inverting Gradients".
    """
    if optimizer not in _OPTIMIZERS or distance not in _DISTANCES:
        raise UserError(
            f"ATS's attacks combine {', '.join(_OPTIMIZERS)} with {', '.join(_DISTANCES)},"
            f" but got {optimizer!r} and {distance!r}."
        )
    objective: Objective = _DISTANCES[distance](layers=layers or {})
    return GradientInversion(
        objective=objective,
        optimizer=_OPTIMIZERS[optimizer],
        priors=() if optimizer == "lbfgs" else (TotalVariation(weight=total_variation / 0.25),),
        space=Space() if optimizer == "lbfgs" else Space(mean=0.5, std=0.25),
        projection="none" if optimizer == "lbfgs" else "clamp",
        iterations=iterations,
        restarts=restarts,
        labels=labels,
        start=named_start(start),
        local_steps=local_steps,
        compile=compile,
        dtype=dtype,
        device=device,
    )
