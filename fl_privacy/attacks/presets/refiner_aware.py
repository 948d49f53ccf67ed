"""Attackers who know that the clients use Refiner."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fl_privacy.attacks.gradient_inversion.attack import GradientInversion
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.settings import Compile, LabelPolicy
from fl_privacy.attacks.gradient_inversion.targets import LocalSteps
from fl_privacy.attacks.presets.against_refiner import NoiseRatio, Sphere
from fl_privacy.attacks.presets.deep_leakage import idlg
from fl_privacy.attacks.presets.inverting import inverting_gradients
from fl_privacy.errors import UserError
from fl_privacy.evaluator import read_about


def refiner_aware(
    *,
    base: Literal["inverting_gradients", "idlg"] = "inverting_gradients",
    radius: float | None = 0.1,
    away_from_noise: float = 0.0,
    evaluator: str | None = None,
    iterations: int = 1000,
    restarts: int = 1,
    labels: LabelPolicy = "auto",
    start: str = "normal",
    layers: Mapping[str, float] | None = None,
    local_steps: LocalSteps = "unroll",
    compile: Compile = "off",
    dtype: Literal["float32", "float64"] = "float32",
    device: str | None = None,
) -> GradientInversion:
    """Attackers of Refiner: images whose gradient is epsilon away (appendix M), images that do not look like noise.

    Both are weaker than ``base`` alone where we measured them: the middle of the sphere is a better guess than any
    point on it. The attacker that averages uploads of the same image over rounds is what ``threat_model=adaptive`` adds
    to any attack.

    Args:
        base: whose objective and optimizer are used.
        radius: Refiner's epsilon, at least 0; ``None`` matches the upload itself.
        away_from_noise: weight of the noise ratio of the guess, at least 0. The loss of ``inverting_gradients`` is 1
            for a useless gradient, that of ``idlg`` the squared norm of the upload.
        evaluator: file of the evaluation network, opened once; ``None`` takes a small one, for grey images only.
    """
    if base not in ("inverting_gradients", "idlg"):
        raise UserError(f"attack.base is expected to be one of inverting_gradients, idlg, but got {base!r}.")
    for name, value in (("radius", radius), ("away_from_noise", away_from_noise)):
        if value is not None and value < 0:
            raise UserError(f"attack.{name} is expected to be at least 0, but got {value}.")
    make = inverting_gradients if base == "inverting_gradients" else idlg
    attack = make(
        iterations=iterations,
        restarts=restarts,
        labels=labels,
        start=start,
        layers=layers,
        local_steps=local_steps,
        compile=compile,
        dtype=dtype,
        device=device,
    )
    if away_from_noise:
        if evaluator is not None:
            read_about(Path(evaluator).expanduser())
        attack = replace(attack, priors=(*attack.priors, NoiseRatio(away_from_noise, evaluator)), enough=0.0)
    if radius is not None:
        assert isinstance(attack.objective, (L2, Cosine))
        attack = replace(attack, objective=Sphere(attack.objective, radius), enough=0.0)
    return attack
