"""What a client trains on: which examples, in which order, changed how."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.data.examples import LabelledExamples
from fl_privacy.defenses import Defense, LocalData
from fl_privacy.errors import UserError
from fl_privacy.types import Batch, LocalPlan


@dataclass(frozen=True)
class OwnExamples:
    """``batch`` takes indices below ``number``; ``seconds`` is what the defense took to make them."""

    number: int
    batch: Callable[[Tensor], Batch]
    seconds: float = 0.0

    @classmethod
    def of(cls, examples: LabelledExamples, indices: Tensor, device: torch.device | str) -> "OwnExamples":
        """Those of ``examples`` at ``indices``, as they are."""
        return cls(len(indices), lambda chosen: examples.batch(indices[chosen], device))

    @classmethod
    def exchanged(cls, batch: Batch, defense: Defense, data: LocalData) -> "OwnExamples":
        """What ``defense`` makes of ``batch``, all that the client has."""
        started = time.perf_counter()
        for hook in defense.examples:
            batch = hook(batch, data)
        return cls(len(batch), lambda i: Batch(batch.inputs[i], batch.labels[i]), time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalWork:
    """The local steps behind an upload.

    Attributes:
        order: which examples each step takes.
        batches: these, augmented, as they are before a defense of the data.
        plan: of the round.
        purpose: names the random streams.
        num_examples: that the upload says it is of; ``None`` are all that ``order`` visits.
        seconds: that the defense took to make the examples.
    """

    order: Sequence[Tensor]
    batches: Sequence[Batch]
    plan: LocalPlan
    purpose: str
    num_examples: int | None = None
    seconds: float = 0.0


def local_batches(num_examples: int, plan: LocalPlan, rng: torch.Generator) -> list[Tensor]:
    """Index tensors of the local steps of one round, drawn without replacement within each pass.

    A plan without steps and epochs makes one step. A pass of fewer examples than ``batch_size`` is one batch;
    the last batch of an epoch may be short, those of a plan that counts steps are all equally long.
    """
    size = min(plan.batch_size or num_examples, num_examples)
    if plan.epochs is not None:
        return [batch for _ in range(plan.epochs) for batch in torch.randperm(num_examples, generator=rng).split(size)]
    steps = plan.steps or 1
    per_pass = num_examples // size
    passes = math.ceil(steps / per_pass)
    order = [torch.randperm(num_examples, generator=rng)[: per_pass * size].split(size) for _ in range(passes)]
    return [batch for one_pass in order for batch in one_pass][:steps]


def augment(batch: Batch, plan: LocalPlan, rng: torch.Generator) -> Batch:
    """``batch`` as ``plan`` changes training images; each image has its own draws."""
    images = batch.inputs
    if not images.is_floating_point():
        raise UserError(
            "plan.crop_padding and plan.flip are expected with images, but the data are text; leave them out."
        )
    if plan.crop_padding:
        offsets = torch.randint(2 * plan.crop_padding + 1, (2, len(images)), generator=rng, device=rng.device)
        images = cropped(images, plan.crop_padding, offsets.to(images.device))
    if plan.flip:
        flips = torch.rand(len(images), generator=rng, device=rng.device) < 0.5
        images = torch.where(flips.to(images.device).view(-1, 1, 1, 1), images.flip(-1), images)
    return Batch(images, batch.labels)


def cropped(images: Tensor, padding: int, offsets: Tensor) -> Tensor:
    """Windows of the images' size in the padded images.

    Args:
        images: (B, C, H, W).
        padding: black pixels on every side.
        offsets: (2, B) first row and column of each window, from 0 to twice ``padding``.
    """
    height, width = images.shape[-2:]
    padded = F.pad(images, (padding,) * 4).movedim(1, -1)
    top, left = offsets.unsqueeze(-1)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    each = torch.arange(len(images), device=images.device)
    return padded[each[:, None, None], rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
