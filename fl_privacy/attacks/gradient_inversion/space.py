"""Where the images are optimized and what keeps them there."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Projection = Literal["none", "clamp", "minmax"]
"""``clamp`` cuts to [0, 1]; ``minmax`` maps each image's range that leaves [0, 1] onto [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Images are ``mean + std * variables``; the papers that optimize normalized images use their data's values."""

    mean: float = 0.0
    std: float = 1.0

    def to_images(self, variables: Tensor) -> Tensor:
        """Variables -> images."""
        return variables if (self.mean, self.std) == (0.0, 1.0) else self.mean + self.std * variables

    def to_variables(self, images: Tensor) -> Tensor:
        """Images -> variables."""
        return images if (self.mean, self.std) == (0.0, 1.0) else (images - self.mean) / self.std


def project(images: Tensor, how: Projection) -> Tensor:
    """``images`` (V, B, C, H, W) brought to [0, 1]."""
    if how == "clamp":
        return images.clamp(0, 1)
    if how == "minmax":
        low = images.amin((2, 3, 4), keepdim=True).clamp_max(0)
        high = images.amax((2, 3, 4), keepdim=True).clamp_min(1)
        return (images - low) / (high - low)
    return images
