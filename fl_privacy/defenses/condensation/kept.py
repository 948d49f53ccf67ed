"""Made once on a client, then taken from its own state."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fl_privacy.defenses.base import Defense, ExamplesHook, LocalData, OutcomeHook
from fl_privacy.types import Batch

Make = Callable[[Batch, LocalData], Batch]
"""What stands for a client's examples, made of them."""


def exchanging(name: str, make: Make, *, outcome: OutcomeHook, public: Mapping[str, Any]) -> Defense:
    """The defense ``name``: a client trains on what ``make`` made once of its examples, as many as ``outcome`` says."""
    return Defense(name=name, examples=(made_once(name, make),), outcome=(outcome,), public=public)


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
