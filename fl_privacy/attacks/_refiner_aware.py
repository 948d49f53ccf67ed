"""Gradient inversion that knows Refiner (appendix M and section 6)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Unpack

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.layer_statistics import LayerStatistics
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine, LayerWeights
from fl_privacy.attacks.gradient_inversion.priors import Guess
from fl_privacy.attacks.preset_options import GradientOptions, takes, vary
from fl_privacy.attacks.presets import idlg, inverting_gradients
from fl_privacy.checks import one_of
from fl_privacy.errors import UserError
from fl_privacy.files.foreign import expanded
from fl_privacy.models.pretrained.evaluator_files import CachedEvaluator, read_about


@dataclass(frozen=True)
class Sphere:
    """Objective: difference of the loss from that of a gradient at distance ``radius`` (Refiner, appendix M).

    Refiner's projection leaves the upload that far from the true gradient. As a cosine distance it is that of the
    tangent, 1 - sqrt(1 - radius^2 / ||g||^2).

    Attributes:
        radius: Refiner's epsilon, an l2 norm.
    """

    objective: L2 | Cosine
    radius: float
    elementwise: bool = field(default=True, init=False)
    by_layer: bool = field(default=True, init=False)

    @property
    def layers(self) -> LayerWeights:
        return self.objective.layers

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        loss = self.objective(statistics)
        if isinstance(self.objective, L2):
            return (loss - self.radius**2).abs()
        squared = torch.stack([s.target.squared for s in statistics.values()]).sum(0)
        share = (self.radius**2 / squared).clamp_max(1)
        return (loss - (1 - (1 - share).sqrt())).abs()


@dataclass(frozen=True)
class NoiseRatio:
    """Prior: the guess's noise ratio by Refiner's evaluation network, away from robust data.

    Attributes:
        evaluator: file of the network; ``None``: the small one for gray images.
    """

    weight: float
    evaluator: str | None = None

    def __call__(self, guess: Guess) -> Tensor:
        images = guess.images
        network = self._find(images.shape[2:], images.device)
        ratios: Tensor = network(images.flatten(0, 1).clamp(0, 1).float())
        return self.weight * ratios.reshape(len(images), -1).mean(1).to(images.dtype)

    @cached_property
    def _find(self) -> CachedEvaluator:
        return CachedEvaluator(self.evaluator)


@takes(GradientOptions)
def refiner_aware(
    *,
    base: Literal["inverting_gradients", "idlg"] = "inverting_gradients",
    radius: float | None = 0.1,
    away_from_noise: float = 0.0,
    evaluator: str | None = None,
    **options: Unpack[GradientOptions],
) -> GradientInversion:
    """Search images whose gradient is epsilon away from Refiner's upload, or images unlike noise.

    Both are ours, after the paper's Appendix M (``refiner_solved``), and weaker than ``base`` in our measurements: the
    sphere's middle is a better guess than any point on it. ``threat_model=adaptive`` averages uploads of an image over
    rounds.

    Args:
        base: attack whose objective and optimizer are used.
        radius: Refiner's epsilon, at least 0; ``None`` matches the upload itself.
        away_from_noise: weight of the guess's noise ratio, at least 0. The loss of ``inverting_gradients`` is 1 for a
            useless gradient, that of ``idlg`` the squared norm of the upload.
        evaluator: file of the evaluation network; ``None``: a small one, for gray images only.
    """
    one_of("attack.base", base, ("inverting_gradients", "idlg"))
    for name, value in (("radius", radius), ("away_from_noise", away_from_noise)):
        if value is not None and value < 0:
            raise UserError(f"attack.{name} is expected to be at least 0, but got {value}.")
    published = inverting_gradients() if base == "inverting_gradients" else idlg()
    published = replace(published, iterations=1000, compile="off")
    if away_from_noise or radius is not None:
        published = replace(published, enough=0.0)
    attack = vary(published, options)
    if away_from_noise:
        if evaluator is not None:
            read_about(expanded(evaluator))
        attack = replace(attack, priors=(*attack.priors, NoiseRatio(away_from_noise, evaluator)))
    if radius is not None:
        assert isinstance(attack.objective, L2 | Cosine)
        attack = replace(attack, objective=Sphere(attack.objective, radius))
    return attack
