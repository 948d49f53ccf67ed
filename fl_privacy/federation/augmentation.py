"""Standard augmentation of training images: a shifted window of each, mirrored or not."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.types import Batch, LocalPlan


def augment(batch: Batch, plan: LocalPlan, rng: torch.Generator) -> Batch:
    """``batch`` as ``plan`` changes training images; each image has its own draws."""
    images = batch.inputs
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
