"""What model inversion minimizes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fl_privacy.attacks.gradient_inversion.initialization import Projection, Space, project
from fl_privacy.attacks.gradient_inversion.priors import Guess, Prior
from fl_privacy.models import Front


@dataclass(frozen=True, kw_only=True, eq=False)
class InversionProblem:
    """``||F(x) - O||^2`` plus priors, of the variables (V, N): pixels, then values of the front.

    Attributes:
        front: F, with the values that are known or stand in for the victim's.
        features: O, (V, B, ...).
        priors: on images.
        space: of the pixels.
        shape: (B, C, H, W) of one victim.
        unknown: values of the front that are optimized with the images, as they stand in for the victim's; by name.
        anchor: weight of their squared distance to these, in shares of the squared norm.
        relative: whether the distance is divided by ``||O||^2``.
        attempts: so many neighboring victims are attempts at the same one.
    """

    front: Front
    features: Tensor
    priors: tuple[Prior, ...]
    space: Space
    shape: tuple[int, ...]
    unknown: Mapping[str, Tensor]
    anchor: float
    relative: bool = True
    attempts: int = 1

    @property
    def pixels(self) -> int:
        return int(torch.Size(self.shape).numel())

    def images(self, variables: Tensor) -> Tensor:
        """(V, B, C, H, W)."""
        return self.space.to_images(variables[:, : self.pixels].reshape(-1, *self.shape))

    def loss(self, variables: Tensor) -> Tensor:
        """(V,)."""
        images = self.images(variables)
        if self.unknown:
            values, strayed = self._values(variables[:, self.pixels :])
            features = vmap(lambda own, x: functional_call(self.front, own, (x,)))(values, images)
        else:
            features = self.front(images.flatten(0, 1)).unflatten(0, images.shape[:2])
            strayed = images.new_zeros(len(images))
        distance = (features - self.features).flatten(1).square().sum(1)
        unit = self.features.flatten(1).square().sum(1) if self.relative else 1.0
        loss: Tensor = distance / unit + self.anchor * strayed
        guess = Guess(images, self.attempts, lambda: ())
        for prior in self.priors:
            loss = loss + prior(guess)
        return loss

    def _values(self, flat: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The front's values (V, ...) by name, and how far they are from those that they started from, (V,)."""
        pieces = torch.split(flat, [value.numel() for value in self.unknown.values()], 1)
        values = {
            name: piece.reshape(-1, *value.shape)
            for (name, value), piece in zip(self.unknown.items(), pieces, strict=True)
        }
        origin = torch.cat([value.flatten() for value in self.unknown.values()])
        return values, (flat - origin).square().sum(1) / origin.square().sum()

    def evaluate(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = variables.detach().requires_grad_()
            loss = self.loss(leaf)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), gradient

    def projected(self, variables: Tensor, how: Projection) -> Tensor:
        """The variables with their images brought to [0, 1]."""
        pixels = self.space.to_variables(project(self.images(variables), how)).flatten(1)
        return torch.cat([pixels, variables[:, self.pixels :]], 1)

    def select(self, rows: Tensor) -> "InversionProblem":
        return replace(self, features=self.features[rows])
