"""A client's images class by class, and the images that stand for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_privacy.defenses.defense import Defense, ExamplesHook, LocalData, OutcomeHook
from fl_privacy.effects import Part
from fl_privacy.metrics.matching import hard_labels
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


Make = Callable[[Batch, LocalData], Batch]
"""What stands for a client's examples, made of them."""


def exchanging(part: Part, make: Make, *, outcome: OutcomeHook) -> Defense:
    """A client trains on what ``make`` made once of its examples, as many as ``outcome`` says."""
    return Defense(parts=(part,), examples=(made_once(part.name, make),), outcome=(outcome,))


def made_once(name: str, make: Make) -> ExamplesHook:
    """``make`` as an examples hook that keeps what it made, as bytes, in the client's state under ``name``."""
    images, labels = f"{name}/images", f"{name}/labels"

    def hook(batch: Batch, data: LocalData) -> Batch:
        kept, device = data.state.tensors, batch.inputs.device
        if images not in kept:
            made = make(batch, data)
            kept[images] = (made.inputs * 255).round().to(torch.uint8)
            kept[labels] = made.labels
        return Batch(kept[images].to(device).to(batch.inputs.dtype) / 255, kept[labels].to(device))

    return hook


def of_each_present(images_per_class: int) -> OutcomeHook:
    """So many images of every class that the client holds."""

    def outcome(labels: Tensor, num_classes: int) -> Tensor:
        present: Tensor = torch.unique(labels)
        return present.repeat_interleave(images_per_class)

    return outcome


def of_every_class(images_per_class: int) -> OutcomeHook:
    """So many images of every class there is."""

    def outcome(labels: Tensor, num_classes: int) -> Tensor:
        return torch.arange(num_classes).repeat_interleave(images_per_class)

    return outcome
