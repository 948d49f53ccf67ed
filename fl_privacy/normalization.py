"""How images in [0, 1] are normalized before a model sees them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fl_privacy import checks
from fl_privacy.errors import UserError


@dataclass(frozen=True)
class Normalization:
    """``(x - mean) / std`` by channel, as ``torchvision.transforms.Normalize`` has it.

    Attributes:
        mean: of each channel, or one value for all; of images in [0, 1].
        std: likewise, above 0.
    """

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise UserError(f"{name} is expected to be a list with a number for each channel, but got {values!r}.")
            for value in values:
                checks.number(name, value, above=0 if name == "std" else None, example=0.5)
            object.__setattr__(self, name, tuple(float(value) for value in values))
        if 1 not in (len(self.mean), len(self.std)) and len(self.mean) != len(self.std):
            raise UserError(
                f"mean and std are expected to have as many values, but got {len(self.mean)} and {len(self.std)}."
            )

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """(..., C, H, W) in [0, 1] -> normalized."""
        mean, std = self._like(images)
        return (images - mean) / std

    def undo(self, images: torch.Tensor) -> torch.Tensor:
        """Inverse of the call."""
        mean, std = self._like(images)
        return images * std + mean

    def in_words(self) -> str:
        """``(x - 0.5) / 0.5``."""
        mean, std = (", ".join(f"{v:.4g}" for v in dict.fromkeys(values)) for values in (self.mean, self.std))
        one = len(set(self.mean)) == 1 and len(set(self.std)) == 1
        return f"(x - {mean}) / {std}" if one else f"(x - [{mean}]) / [{std}]"

    def _like(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, std = (images.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return mean, std
