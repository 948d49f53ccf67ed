"""Estimate a defense's parameters from an update, after GGL (Li et al. 2022, section 4.2)."""

import math

import torch
from torch import Tensor

from fl_privacy.types import Tensors

_NORMAL = 0.6744897501960817
"""Median of |z| of a standard normal z."""

_FEWEST = 64
"""Least number of elements for which a median estimates a spread."""


def estimate_noise_std(update: Tensors) -> float:
    """Estimate the standard deviation of noise on every element: the least median magnitude of a tensor over 0.6745.

    That tensor holds little but noise; what else it holds makes the estimate too large. Tensors of less than 64
    elements count only without larger ones.
    """
    large = [t for t in update.values() if t.numel() >= _FEWEST] or list(update.values())
    return min(float(t.abs().median()) for t in large) / _NORMAL


def estimate_clip_norm(update: Tensors, noise_std: float) -> float:
    """Estimate the norm that an update was clipped to, without the noise's part n s^2 of the squared norm.

    It is at least a hundredth of the observed norm, since the difference may drown in noise.
    """
    squared = float(torch.stack([t.double().square().sum() for t in update.values()]).sum())
    count = sum(t.numel() for t in update.values())
    return math.sqrt(max(squared - count * noise_std**2, 1e-4 * squared))


def estimate_step(tensor: Tensor) -> float:
    """Estimate the spacing of a quantized tensor's levels: the least difference of two values, 0 if there is one."""
    levels = torch.unique(tensor.double())
    return float(levels.diff().min()) if len(levels) > 1 else 0.0
