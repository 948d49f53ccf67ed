"""The six attacks that ATS is measured against."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.initialization import Space, named_start
from fl_privacy.attacks.gradient_inversion.objectives import L1, L2, Cosine, Objective
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.attacks.gradient_inversion.settings import Compile, LabelPolicy
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.optimizers import LBFGS, Adam, GradientDescent, Optimizer, StepDecay
from fl_privacy.errors import UserError

Variant = Literal["paper", "code"]
"""Where paper and program differ."""

_MEAN, _STD = 0.5, 0.25
"""Of the images that are normalized."""

_DISTANCES: Mapping[str, type[L1] | type[L2] | type[Cosine]] = {"l1": L1, "l2": L2, "cosine": Cosine}
_SIGNED: Mapping[str, Optimizer] = {
    "adam": Adam(lr=0.1, sign="hard", schedule=StepDecay()),
    "sgd": GradientDescent(lr=0.01, nesterov=True, sign="hard", schedule=StepDecay()),
}


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What a variant says of an optimizer and a distance."""

    optimizer: Optimizer
    iterations: int
    total_variation: float
    restarts: int
    normalized: bool
    boxed: bool


def _settings(variant: Variant, optimizer: str, distance: str) -> _Settings:
    if optimizer in _SIGNED:
        return _Settings(
            optimizer=_SIGNED[optimizer],
            iterations=4800,
            total_variation=1e-4,
            restarts=1,
            normalized=True,
            boxed=True,
        )
    if variant == "paper":
        return _Settings(
            optimizer=LBFGS(), iterations=300, total_variation=0.0, restarts=16, normalized=False, boxed=False
        )
    plain = distance == "l2"
    return _Settings(
        optimizer=LBFGS(lr=1e-4, sign="none" if plain else "hard"),
        iterations=50 if plain else 300,
        total_variation=1e-3 if plain else 1e-4,
        restarts=2 if plain else 16,
        normalized=True,
        boxed=not plain,
    )


def ats(
    *,
    variant: Variant = "paper",
    optimizer: Literal["lbfgs", "adam", "sgd"] = "adam",
    distance: Literal["l1", "l2", "cosine"] = "cosine",
    iterations: int | None = None,
    total_variation: float | None = None,
    restarts: int | None = None,
    labels: LabelPolicy = "auto",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """An attack "optimizer + distance" of ATS (Gao et al. 2021, Table 4; 2023, Section 5.1).

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
        iterations: ``None`` is the variant's, like the next two.
        total_variation: weight, of images normalized by mean 0.5 and standard deviation 0.25.
        restarts: most attempts.
        labels: as for all attacks, like the rest.
        start: first guess.
        layers: weights of tensors.
        local_steps: how they are matched.
        compile: losses and gradients.
        dtype: of the computation.
        device: of the computation.

    Raises:
        UserError: there is no such optimizer, distance or variant.
    """
    if optimizer not in ("lbfgs", *_SIGNED) or distance not in _DISTANCES or variant not in get_args(Variant):
        raise UserError(
            f"ATS's attacks combine lbfgs, {', '.join(_SIGNED)} with {', '.join(_DISTANCES)} as in the paper or code,"
            f" but got {optimizer!r}, {distance!r} and {variant!r}."
        )
    settings = _settings(variant, optimizer, distance)
    objective: Objective = _DISTANCES[distance](layers=layers or {})
    weight = settings.total_variation if total_variation is None else total_variation
    return GradientInversion(
        objective=objective,
        optimizer=settings.optimizer,
        priors=(TotalVariation(weight=weight / _STD),) if weight else (),
        space=Space(mean=_MEAN, std=_STD) if settings.normalized else Space(),
        projection="clamp" if settings.boxed else "none",
        iterations=settings.iterations if iterations is None else iterations,
        restarts=settings.restarts if restarts is None else restarts,
        labels=labels,
        start=named_start(start),
        local_steps=local_steps,
        compile=compile,
        dtype=dtype,
        device=device,
    )
