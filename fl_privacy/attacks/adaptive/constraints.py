"""Constraints on the guesses of an attacker that knows the defense."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive.bounds import AssumedTransform, Bounds
from fl_privacy.attacks.adaptive.clip import Clips


@dataclass(frozen=True, kw_only=True)
class HiddenGradient:
    """Gradients that a private loss, known only to the clients, sends back into the features.

    Attributes:
        weight: name of the weight of the linear layer that the features enter.
        strength: expected size of an element, relative to the factor of the cross entropy, over the root mean square of
            the private head's weights to the power of ``layers``, above 0; the unit of guesses.
        weight_rms: root mean square of the private head's weights; ``None`` for the layer's own.
    """

    weight: str
    strength: float
    weight_rms: float | None
    layers: int = 1

    def unknowns(self, weight: Tensor) -> "Unknowns":
        """Return the variables for a layer with weight ``weight`` (K, F)."""
        rms = self.weight_rms or float(weight.square().mean().sqrt())
        return Unknowns(weight.shape[1], self.strength * rms**self.layers)


@dataclass(frozen=True)
class Unknowns:
    """Variables for a hidden gradient: ``features`` for each example of a round, in this unit."""

    features: int
    unit: float


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateConstraints:
    """Bounds and clipping known of V victims' updates of one round.

    Attributes:
        bounds: (V, *shape) each, of the tensors that are not known exactly.
        clip: client's clipping, for the guess.
    """

    bounds: Bounds
    clip: Clips | None

    def to(self, device: torch.device, dtype: torch.dtype) -> "UpdateConstraints":
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        bounds = {name: (move(low), move(high)) for name, (low, high) in self.bounds.items()}
        return UpdateConstraints(bounds=bounds, clip=self.clip and self.clip.map(move))


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownFeatures:
    """Inputs of a layer of V victims, if its gradient reveals them exactly.

    Attributes:
        front: images (B, C, H, W) -> (B, F).
        values: (V, B, F); zeros if not known.
        weight: (V,) weight of their mismatch; zero if not known.
    """

    front: nn.Module
    values: Tensor
    weight: Tensor

    def mismatch(self, images: Tensor) -> Tensor:
        """Return the relative squared distance (V,) of the features of ``images`` (V, B, C, H, W)."""
        guessed = self.front(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        squared = self.values.flatten(1).square().sum(1)
        apart: Tensor = (guessed - self.values).flatten(1).square().sum(1)
        return self.weight * apart / torch.where(squared > 0, squared, 1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "KnownFeatures":
        return KnownFeatures(front=self.front, values=change(self.values), weight=change(self.weight))


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraints:
    """Everything known of V victims' images and losses.

    Attributes:
        transform: client's transform of its images, applied to the guesses too. Priors of natural images see the guess
            without it, those of the model's inputs the guess with it.
        smoothness: (V,) weight of the images' total variation, next to the attack's own priors.
        likeliest: (V,) the same next to the angle of the whole update, as the noise suggests; zero for victims without.
        any_contrast: ``True`` if total variation is computed at equal contrast.
    """

    transform: AssumedTransform | None = None
    smoothness: Tensor | None = None
    likeliest: Tensor | None = None
    any_contrast: bool = False
    unknowns: Unknowns | None = None
    features: KnownFeatures | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Constraints":
        return Constraints(
            transform=self.transform and self.transform.map(change),
            smoothness=None if self.smoothness is None else change(self.smoothness),
            likeliest=None if self.likeliest is None else change(self.likeliest),
            any_contrast=self.any_contrast,
            unknowns=self.unknowns,
            features=self.features and self.features.map(change),
        )
