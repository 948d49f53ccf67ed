"""Images mixed with noise."""

import torch
from torch import Tensor


def uniform_noise(like: Tensor, rng: torch.Generator) -> Tensor:
    """U[0, 1] for each pixel of ``like``, drawn on the device of ``rng``."""
    return torch.rand(like.shape, generator=rng, device=rng.device, dtype=like.dtype).to(like.device)


def blend_with_noise(images: Tensor, ratios: Tensor, rng: torch.Generator) -> Tensor:
    """``(1 - r) x + r v`` with v ~ U[0, 1] for each pixel (Refiner, section 3.3).

    Args:
        images: (N, C, H, W) in [0, 1].
        ratios: (N,) r in [0, 1].
        rng: of the noise.
    """
    return torch.lerp(images, uniform_noise(images, rng), ratios.to(images).view(-1, 1, 1, 1))
