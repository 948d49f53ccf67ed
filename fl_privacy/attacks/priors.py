"""What natural images look like: terms added to the attack's objective, each (V,) for images (V, B, C, H, W)."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Prior(Protocol):
    """Images (V, B, C, H, W) -> penalty (V,), already weighted."""

    def __call__(self, images: Tensor) -> Tensor:
        """Penalty (V,)."""
        ...


@dataclass(frozen=True, kw_only=True)
class TotalVariation:
    """Total variation: the mean absolute (or Euclidean) difference of neighboring pixels.

    Attributes:
        weight: factor.
        isotropic: mean over pixels of the length of (horizontal, vertical) difference instead of the mean horizontal
            plus the mean vertical absolute difference.
    """

    weight: float = 1e-4
    isotropic: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        """Penalty (V,)."""
        across = images[..., :, 1:] - images[..., :, :-1]
        down = images[..., 1:, :] - images[..., :-1, :]
        if self.isotropic:
            length = (across[..., :-1, :].square() + down[..., :, :-1].square() + 1e-12).sqrt()
            return self.weight * length.flatten(1).mean(1)
        return self.weight * (across.abs().flatten(1).mean(1) + down.abs().flatten(1).mean(1))


@dataclass(frozen=True, kw_only=True)
class ImageNorm:
    """Mean over the batch of the Euclidean norm of an image (GradInversion, Yin et al. 2021, Eq. 9)."""

    weight: float = 1e-6

    def __call__(self, images: Tensor) -> Tensor:
        """Penalty (V,)."""
        return self.weight * (images.flatten(2).square().sum(2) + 1e-12).sqrt().mean(1)


@dataclass(frozen=True, kw_only=True)
class ColorRange:
    """Mean squared distance of the pixels to [0, 1]."""

    weight: float = 1e-2

    def __call__(self, images: Tensor) -> Tensor:
        """Penalty (V,)."""
        return self.weight * (images - images.clamp(0, 1)).square().flatten(1).mean(1)
