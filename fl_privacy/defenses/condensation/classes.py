"""A client's images class by class, and the images that stand for them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_privacy.metrics.labels import hard_labels
from fl_privacy.types import Batch

MIDDLE, SPREAD = 0.5, 0.25
"""Condensed images are optimized normalized: pixels minus 0.5, over 0.25."""


Start = Literal["noise", "real"]
"""What condensed images start as: normal noise around the middle of the range, or images of the client."""


@dataclass(frozen=True, eq=False)
class Classes:
    """The examples of one client, to be drawn by class.

    Attributes:
        images: (N, C, H, W) normalized.
        present: (P,) the classes it holds.
        first: (P,) place of each class's first example in ``order``.
        counts: (P,) examples of each class.
        order: (N,) examples sorted by class.
    """

    images: Tensor
    present: Tensor
    first: Tensor
    counts: Tensor
    order: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Classes":
        """The classes in ``batch``, with inputs in [0, 1]."""
        labels = hard_labels(batch.labels)
        present, counts = torch.unique(labels, return_counts=True)
        first = counts.cumsum(0) - counts
        return cls((batch.inputs - MIDDLE) / SPREAD, present, first, counts, labels.argsort(stable=True))

    def draw(self, number: int, rng: torch.Generator) -> Tensor:
        """(P, number, C, H, W): of each class, with replacement."""
        chance = torch.rand(len(self.present), number, generator=rng, device=rng.device).to(self.images.device)
        place = self.first.unsqueeze(1) + (chance * self.counts.unsqueeze(1)).long()
        return self.images[self.order[place]]

    def start(self, number: int, how: Start, rng: torch.Generator) -> Tensor:
        """(P, number, C, H, W): what the condensed images of each class start as."""
        if how == "real":
            return self.draw(number, rng)
        shape = (len(self.present), number, *self.images.shape[1:])
        return torch.randn(shape, generator=rng, device=rng.device).to(self.images)

    def finished(self, images: Tensor) -> Batch:
        """(P, I, C, H, W) normalized images as a batch of 256 levels in [0, 1]."""
        pixels = (MIDDLE + SPREAD * images.detach()).clamp(0, 1)
        return Batch((pixels.flatten(0, 1) * 255).round() / 255, self.present.repeat_interleave(images.shape[1]))
