"""Clipping to a norm and independent noise: what mechanisms of differential privacy are made of."""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fl_privacy.effects import Scope
from fl_privacy.rng import SecretGenerator
from fl_privacy.types import Tensors


def clip_by_norm(tensors: Tensors, norm: float, *, scope: Scope = "global") -> Tensors:
    """``tensors`` scaled by min(1, norm / l2 norm); directions and what lies within ``norm`` stay.

    Args:
        tensors: gradient or delta by name.
        norm: the largest l2 norm that stays, above 0; of each tensor if ``scope`` is ``layer``.
        scope: over what the norm is taken.
    """
    if not tensors:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(t) for t in tensors.values()])
    if scope == "global":
        norms = torch.linalg.vector_norm(norms).expand(len(tensors))
    factors = (norm / norms).clamp(max=1.0)  # norm / 0 = inf is clamped too
    return {name: t * factor.to(t.dtype) for (name, t), factor in zip(tensors.items(), factors, strict=True)}


Distribution = Literal["gaussian", "laplace"]


def sample_noise(like: Tensor, distribution: Distribution, scale: float, rng: torch.Generator) -> Tensor:
    """Independent zero-mean noise with the shape, dtype and device of ``like``, drawn on the device of ``rng``.

    Args:
        like: of any shape.
        distribution: of each element.
        scale: standard deviation of the Gaussian; the Laplace parameter b, whose standard deviation is sqrt(2) b.
        rng: advanced by the draw; that of a client's secret gives cryptographic bits.
    """
    if isinstance(rng, SecretGenerator):
        return _secret_noise(like, distribution, scale, rng)
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


def _secret_noise(like: Tensor, distribution: Distribution, scale: float, rng: SecretGenerator) -> Tensor:
    """``sample_noise`` by the inverse distribution function of 52 bits and a sign, in double precision."""
    bits = np.frombuffer(rng.next_bytes(8 * like.numel()), dtype="<u8")
    share = torch.from_numpy(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)
    size = torch.erfinv(share).mul_(math.sqrt(2)) if distribution == "gaussian" else share.neg_().log1p_().neg_()
    signed = torch.from_numpy(np.where(bits & np.uint64(1), 1.0, -1.0)).mul_(size).mul_(scale)
    return signed.view(like.shape).to(like)
