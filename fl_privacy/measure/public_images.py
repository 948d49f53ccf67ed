"""Public images and their means, from which an original is distinguished."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.measure.descriptors import COARSE, Moved, Sight, Standing, largest
from fl_privacy.measure.outcome import SAME
from fl_privacy.measure.turning import Gallery

ALIKE = 3  # most images of the same scene as an original; more would be usual


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicImages:
    """Distractor images, none of them attacked.

    Attributes:
        images: (N, C, H, W) in [0, 1].
        labels: (N,) classes, if known.
        more: (M, C, H, W) of bytes, also searched for the nearest image.
        controls: original and label -> cached largest PSNR and SSIM without an update.
        near: original -> cached lead and likeness of the nearest public image.
    """

    images: Tensor
    labels: Tensor | None = None
    name: str = "public images"
    more: Tensor | None = None
    controls: dict[tuple[bytes, int | None], tuple[float, float]] = field(default_factory=dict, repr=False)
    near: dict[bytes, tuple[float, float]] = field(default_factory=dict, repr=False)
    _looks: dict[Sight, Standing] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def mean(self) -> Tensor:
        """Return the mean (C, H, W) of all images."""
        return self.images.mean(0)

    @cached_property
    def class_means(self) -> dict[int, Tensor]:
        """Return the mean (C, H, W) of each class, if known."""
        if self.labels is None:
            return {}
        return {label: self.images[self.labels == label].mean(0) for label in sorted(set(self.labels.tolist()))}

    @cached_property
    def rivals(self) -> Tensor:
        """Return the images, their mean, and each class mean, (N + M, C, H, W)."""
        return torch.cat([self.images, torch.stack([self.mean, *self.class_means.values()])])

    def standing(self, sight: Sight) -> Standing:
        return self._looks.setdefault(sight, Standing(self.rivals, sight))

    @cached_property
    def gallery(self) -> Gallery:
        return Gallery(self.rivals)

    def nearest(self, original: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the public images most like ``original`` (C, H, W) but not equal, up to mirror and shift.

        Returns:
            The nearest (C, H, W), and (K, C, H, W) almost equal ones among ``images``; ``None`` without another image.
        """
        places = Moved(original[None], COARSE).rows(0, 0)
        found = [(self.images, largest(places, self.standing(COARSE).rows(0, 0)[: len(self.images)]))]
        if self.more is not None:
            found.append((self.more, largest(places, self._more_rows)))
        best, itself = [], _as_bytes(original[None])
        for images, likeness in found:
            for place in likeness.topk(min(2, len(images))).indices.tolist():
                image = images[place].float() / (255 if images.dtype == torch.uint8 else 1)
                if not torch.equal(_as_bytes(image[None]), itself):
                    best.append((float(likeness[place]), image))
                    break
        if not best:
            return None
        alike = found[0][1].topk(min(ALIKE, len(self.images)))
        return max(best, key=lambda one: one[0])[1], self.images[alike.indices[alike.values >= SAME]]

    @cached_property
    def _more_rows(self) -> Tensor:
        assert self.more is not None
        return torch.cat([Standing(part.float() / 255, COARSE).rows(0, 0) for part in torch.split(self.more, 1000)])

    @cached_property
    def _places(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for place, image in enumerate(_as_bytes(self.images)):
            found.setdefault(image.numpy().tobytes(), []).append(place)
        return found

    def equal(self, originals: Tensor) -> Tensor:
        """Mark the images (N,) that equal one of ``originals`` (B, C, H, W) up to rounding of pixels."""
        found = torch.zeros(len(self.images), dtype=torch.bool)
        for original in _as_bytes(originals):
            found[self._places.get(original.numpy().tobytes(), [])] = True
        return found


def _as_bytes(images: Tensor) -> Tensor:
    return (255 * images.clamp(0, 1)).round().to(torch.uint8).flatten(1)
