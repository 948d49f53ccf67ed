"""Images that nobody attacks, and what they have in common: what an original is distinguished from."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.metrics.looks import Sight, Standing
from fl_privacy.metrics.turning import Gallery


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicImages:
    """Images that an original has to be distinguished from, none of them attacked.

    Attributes:
        images: (N, C, H, W) in [0, 1].
        labels: (N,) their classes; ``None`` where nobody knows them.
        name: what they are, a short phrase.
        controls: largest PSNR and SSIM without an update, by original and label; kept for originals that come again.
    """

    images: Tensor
    labels: Tensor | None = None
    name: str = "public images"
    controls: dict[tuple[bytes, int | None], tuple[float, float]] = field(default_factory=dict, repr=False)
    _looks: dict[Sight, Standing] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def mean(self) -> Tensor:
        """Return the mean (C, H, W) of all images."""
        return self.images.mean(0)

    def class_mean(self, label: int) -> Tensor | None:
        """Return the mean (C, H, W) of a class; ``None`` where there is none or classes are unknown."""
        return self._class_means.get(label)

    @cached_property
    def _class_means(self) -> dict[int, Tensor]:
        if self.labels is None:
            return {}
        return {label: self.images[self.labels == label].mean(0) for label in sorted(set(self.labels.tolist()))}

    @cached_property
    def rivals(self) -> Tensor:
        """Return the images and what they have in common, (N + M, C, H, W): the mean of all, and of each class."""
        return torch.cat([self.images, torch.stack([self.mean, *self._class_means.values()])])

    def standing(self, sight: Sight) -> Standing:
        """Return rows of ``rivals`` to compare with, kept once they are made."""
        return self._looks.setdefault(sight, Standing(self.rivals, sight))

    @cached_property
    def gallery(self) -> Gallery:
        """Return ``rivals`` to compare with in all poses."""
        return Gallery(self.rivals)

    @cached_property
    def _places(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for place, image in enumerate(_as_bytes(self.images)):
            found.setdefault(image.numpy().tobytes(), []).append(place)
        return found

    def equal(self, originals: Tensor) -> Tensor:
        """Say whether each candidate is one of ``originals`` (B, C, H, W), to the rounding of pixels, (N,)."""
        found = torch.zeros(len(self.images), dtype=torch.bool)
        for original in _as_bytes(originals):
            found[self._places.get(original.numpy().tobytes(), [])] = True
        return found


def _as_bytes(images: Tensor) -> Tensor:
    return (255 * images.clamp(0, 1)).round().to(torch.uint8).flatten(1)
