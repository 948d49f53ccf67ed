"""What an update tells about the defense that made it, where nobody else does.

The idea is that of GGL (Li et al. 2022, section 4.2): the clip bound is read off the update.
"""

import math

import torch
from torch import Tensor

from fl_privacy.types import Tensors

_NORMAL = 0.6744897501960817
"""Median of |z| of a standard normal z."""

_FEWEST = 64
"""Elements from which a median tells a spread."""


def estimate_noise_std(update: Tensors) -> float:
    """Estimate the standard deviation of noise added to every element: the least robust spread among the tensors.

    The spread is the median magnitude over 0.6745, that of a normal variable. In most tensors of a gradient the typical
    element is far below the largest ones, so that the tensor with the least spread holds little else than noise; the
    estimate is too large by what it holds. Tensors of less than 64 elements count only where there are no larger ones.
    """
    large = [t for t in update.values() if t.numel() >= _FEWEST] or list(update.values())
    return min(float(t.abs().median()) for t in large) / _NORMAL


def estimate_clip_norm(update: Tensors, noise_std: float) -> float:
    """Estimate the norm that an update was clipped to: the observed norm without the noise's part.

    Noise of standard deviation s adds n s^2 to the squared norm of n elements. At least a hundredth of the observed
    norm, since the difference of the two may drown in noise.
    """
    squared = float(torch.stack([t.double().square().sum() for t in update.values()]).sum())
    count = sum(t.numel() for t in update.values())
    return math.sqrt(max(squared - count * noise_std**2, 1e-4 * squared))


def estimate_step(tensor: Tensor) -> float:
    """Estimate the spacing of a quantized tensor's levels: the least difference of two values, 0 if there is one.

    Exact where two neighboring levels occur, as they do with few bits.
    """
    levels = torch.unique(tensor.double())
    return float(levels.diff().min()) if len(levels) > 1 else 0.0
