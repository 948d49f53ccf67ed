"""Differentiable siamese augmentation: one random change, done alike to real and condensed images."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Augmentation = Callable[[Tensor], Tensor]
"""(..., C, H, W) -> the same, differentiable."""


def siamese(rng: torch.Generator) -> Augmentation:
    """One of color, crop, cutout, flip, scale and rotation with its parameters drawn (Zhao and Bilen 2021)."""
    kinds: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (_color, _crop, _cutout, _flip, _scale, _rotate)
    chosen = int(torch.randint(len(kinds), (1,), generator=rng, device=rng.device))
    draws = torch.rand(3, generator=rng, device=rng.device)
    return lambda images: kinds[chosen](images, draws)


def siamese_by_class(classes: int, rng: torch.Generator) -> Augmentation:
    """``siamese`` with a draw for each of the ``classes`` in the first dimension, as in the authors' code."""
    changes = [siamese(rng) for _ in range(classes)]
    return lambda images: torch.stack([change(of_class) for change, of_class in zip(changes, images, strict=True)])


def unaugmented(images: Tensor) -> Tensor:
    """The images as they are: the augmentation of methods without one."""
    return images


def _color(images: Tensor, draws: Tensor) -> Tensor:
    brightness, saturation, contrast = draws.tolist()
    images = images + (brightness - 0.5)
    grey = images.mean(-3, keepdim=True)
    images = grey + (images - grey) * (2 * saturation)
    middle = images.mean((-3, -2, -1), keepdim=True)
    changed: Tensor = middle + (images - middle) * (contrast + 0.5)
    return changed


def _crop(images: Tensor, draws: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    reach_y, reach_x = round(height / 8), round(width / 8)
    top, left = int(draws[0] * (2 * reach_y + 1)), int(draws[1] * (2 * reach_x + 1))
    padded = F.pad(images, (reach_x, reach_x, reach_y, reach_y))
    return padded[..., top : top + height, left : left + width]


def _cutout(images: Tensor, draws: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    top, left = int(draws[0] * (height // 2 + 1)), int(draws[1] * (width // 2 + 1))
    mask = torch.ones(height, width, device=images.device)
    mask[top : top + height // 2, left : left + width // 2] = 0
    return images * mask


def _flip(images: Tensor, draws: Tensor) -> Tensor:
    return images.flip(-1) if draws[0] < 0.5 else images


def _scale(images: Tensor, draws: Tensor) -> Tensor:
    factors = [1.2 ** (2 * draw - 1) for draw in draws[:2].tolist()]
    return _affine(images, [[factors[0], 0.0, 0.0], [0.0, factors[1], 0.0]])


def _rotate(images: Tensor, draws: Tensor) -> Tensor:
    angle = math.radians(15 * (2 * float(draws[0]) - 1))
    cosine, sine = math.cos(angle), math.sin(angle)
    return _affine(images, [[cosine, -sine, 0.0], [sine, cosine, 0.0]])


def _affine(images: Tensor, matrix: list[list[float]]) -> Tensor:
    flat = images.reshape(-1, *images.shape[-3:])
    theta = flat.new_tensor(matrix).expand(len(flat), 2, 3)
    grid = F.affine_grid(theta, list(flat.shape), align_corners=False)
    return F.grid_sample(flat, grid, align_corners=False).reshape(images.shape)
