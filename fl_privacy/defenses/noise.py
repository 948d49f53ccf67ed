"""Random tensors in the likeness of others."""

import math
from typing import Literal

import torch
from torch import Tensor

Distribution = Literal["gaussian", "laplace"]


def sample_noise(like: Tensor, distribution: Distribution, scale: float, rng: torch.Generator) -> Tensor:
    """Independent zero-mean noise with the shape, dtype and device of ``like``, drawn on the device of ``rng``.

    Args:
        like: of any shape.
        distribution: of each element.
        scale: standard deviation of the Gaussian; the Laplace parameter b, whose standard deviation is sqrt(2) b.
        rng: advanced by the draw.
    """
    noise = torch.empty(like.shape, dtype=like.dtype, device=rng.device)
    if distribution == "gaussian":
        noise.normal_(std=scale, generator=rng)
    else:  # by the inverse of the distribution function, which is three times as fast as exponential_
        noise.uniform_(-1, 1, generator=rng)
        below_one = 1 - torch.finfo(noise.dtype).eps / 2
        noise = noise.abs().clamp_max_(below_one).neg_().log1p_().mul_(scale).copysign_(noise)
    return noise.to(like.device)


def noise_std(distribution: Distribution, scale: float) -> float:
    """Standard deviation of an element of ``sample_noise``."""
    return scale * (math.sqrt(2) if distribution == "laplace" else 1.0)
