"""What an attacker who knows Refiner may put into gradient inversion (Refiner, appendix M and section 6)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine, LayerWeights
from fl_privacy.attacks.gradient_inversion.priors import Guess
from fl_privacy.attacks.gradient_inversion.statistics import LayerStatistics
from fl_privacy.evaluator import CachedEvaluator


@dataclass(frozen=True)
class Sphere:
    """How far the loss of ``objective`` is from that of a gradient at distance ``radius`` (Refiner, appendix M).

    Refiner's projection leaves the upload that far from the true gradient, which is why its authors let the attacker
    look there. As a cosine distance it is that of the tangent, 1 - sqrt(1 - radius^2 / ||g||^2).

    Attributes:
        objective: distance of gradients.
        radius: Refiner's epsilon, an l2 norm.
    """

    objective: L2 | Cosine
    radius: float
    elementwise: bool = field(default=True, init=False)

    @property
    def layers(self) -> LayerWeights:
        """Those of ``objective``."""
        return self.objective.layers

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        """Loss (V,)."""
        loss = self.objective(statistics)
        if isinstance(self.objective, L2):
            return (loss - self.radius**2).abs()
        squared = torch.stack([s.target.squared for s in statistics.values()]).sum(0)
        share = (self.radius**2 / squared).clamp_max(1)
        return (loss - (1 - (1 - share).sqrt())).abs()


@dataclass(frozen=True)
class NoiseRatio:
    """The noise ratio that Refiner's evaluation network sees in the guess: away from what robust data look like.

    Attributes:
        weight: factor.
        evaluator: file of the network; ``None`` takes the small one for grey images.
    """

    weight: float
    evaluator: str | None = None

    def __call__(self, guess: Guess) -> Tensor:
        """Penalty (V,)."""
        images = guess.images
        network = self._find(images.shape[2:], images.device)
        ratios: Tensor = network(images.flatten(0, 1).clamp(0, 1).float())
        return self.weight * ratios.reshape(len(images), -1).mean(1).to(images.dtype)

    @cached_property
    def _find(self) -> CachedEvaluator:
        return CachedEvaluator(self.evaluator)
