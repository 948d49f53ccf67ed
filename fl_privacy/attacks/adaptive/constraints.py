"""What an attacker that knows the defense holds its guesses to, beside the values observed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive.bounds import AssumedTransform, Bounds
from fl_privacy.attacks.adaptive.clip import Clips


@dataclass(frozen=True, kw_only=True)
class HiddenGradient:
    """Gradients that a private loss, which only the clients know, sends back into the features.

    Attributes:
        weight: of the linear layer that the features enter.
        strength: expected size of one of them, relative to the factor of the cross entropy, over the root mean square
            of the private head's weights to the power of ``layers``, above 0; sets the unit in which they are guessed.
        weight_rms: of the private head's weights; ``None`` where it is that of the layer's own.
        layers: of the private head, through all of which they go.
    """

    weight: str
    strength: float
    weight_rms: float | None
    layers: int = 1

    def unknowns(self, weight: Tensor) -> "Unknowns":
        """Return the variables to guess for the hidden gradient in front of a layer with weight ``weight`` (K, F)."""
        rms = self.weight_rms or float(weight.square().mean().sqrt())
        return Unknowns(weight.shape[1], self.strength * rms**self.layers)


@dataclass(frozen=True)
class Unknowns:
    """Variables that stand for a hidden gradient: ``features`` of them an example of a round, in this unit."""

    features: int
    unit: float


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateConstraints:
    """Bounds and clipping known of V victims' updates of one round.

    Attributes:
        bounds: (V, *shape) each, of the tensors that are not known exactly.
        clip: what the client did to its gradient, done to the guessed one too.
    """

    bounds: Bounds
    clip: Clips | None

    def to(self, device: torch.device, dtype: torch.dtype) -> "UpdateConstraints":
        """Move all tensors to ``device`` and ``dtype``."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        bounds = {name: (move(low), move(high)) for name, (low, high) in self.bounds.items()}
        return UpdateConstraints(bounds=bounds, clip=self.clip and self.clip.map(move))


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownFeatures:
    """Inputs of a layer of V victims, where its gradient gives them away exactly.

    Attributes:
        front: what the model does up to the layer, images (B, C, H, W) -> (B, F).
        values: (V, B, F); zeros where they are not known.
        weight: (V,) of their mismatch in the objective; zero where they are not known.
    """

    front: nn.Module
    values: Tensor
    weight: Tensor

    def mismatch(self, images: Tensor) -> Tensor:
        """Return the features' squared distance (V,) of ``images`` (V, B, C, H, W), relative to the known ones."""
        guessed = self.front(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        squared = self.values.flatten(1).square().sum(1)
        apart: Tensor = (guessed - self.values).flatten(1).square().sum(1)
        return self.weight * apart / torch.where(squared > 0, squared, 1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "KnownFeatures":
        """Return a copy with every tensor changed whose rows are victims."""
        return KnownFeatures(front=self.front, values=change(self.values), weight=change(self.weight))


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraints:
    """All that is known of V victims' images and losses.

    Attributes:
        transform: what the client did to its images, done to the guessed ones too. Priors of natural images look at
            the guess without it, those of what the model is used to at the guess with it.
        smoothness: (V,) weight of the images' total variation, beside the attack's own priors.
        likeliest: (V,) the same beside the angle of the whole update, where noise says how smooth the images are; zero
            of victims without.
        any_contrast: whether total variation is of images brought to the same contrast.
        unknowns: of a hidden gradient, guessed with the images.
        features: that the images are known to have.
    """

    transform: AssumedTransform | None = None
    smoothness: Tensor | None = None
    likeliest: Tensor | None = None
    any_contrast: bool = False
    unknowns: Unknowns | None = None
    features: KnownFeatures | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Constraints":
        """Return a copy with every tensor changed whose rows are victims."""
        return Constraints(
            transform=self.transform and self.transform.map(change),
            smoothness=None if self.smoothness is None else change(self.smoothness),
            likeliest=None if self.likeliest is None else change(self.likeliest),
            any_contrast=self.any_contrast,
            unknowns=self.unknowns,
            features=self.features and self.features.map(change),
        )
