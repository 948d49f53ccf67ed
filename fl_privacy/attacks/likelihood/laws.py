"""Negative log likelihoods (V,) of an observation given a guess, (V, n) each, without constants."""

import torch
from torch import Tensor

_EDGE = 0.98
"""Share of a step beyond which the likelihood of stochastic rounding continues as a parabola, so that every guess is
possible and has a slope."""

_ROUNDED_OFF = 0.1
"""Share of a Laplace scale within which its kink is rounded off."""


def normal(observed: Tensor, guessed: Tensor, std: Tensor) -> Tensor:
    """Return the loss under Gaussian noise of standard deviation ``std``."""
    return (0.5 * ((observed - guessed) / std).square()).sum(1)


def laplace(observed: Tensor, guessed: Tensor, std: Tensor) -> Tensor:
    """Return the loss under Laplace noise of standard deviation ``std``."""
    apart = (observed - guessed) / (std / 2**0.5)
    return ((apart.square() + _ROUNDED_OFF**2).sqrt() - _ROUNDED_OFF).sum(1)


def stochastic_rounding(observed: Tensor, guessed: Tensor, step: Tensor) -> Tensor:
    """Return the loss of a level after random rounding to one of two neighbors.

    At distance d the probability is 1 - d / step (QSGD, Alistarh et al. 2017).
    """
    apart = (observed - guessed).abs() / step
    inside = -torch.log1p(-apart.clamp(max=_EDGE))
    beyond = (apart - _EDGE).clamp_min(0) / (1 - _EDGE)
    return (inside + beyond + 0.5 * beyond.square()).sum(1)


def interval(guessed: Tensor, low: Tensor, high: Tensor, std: Tensor) -> Tensor:
    """Return the loss of a value between ``low`` and ``high``, whose edges are soft by ``std``."""
    beyond = (low - guessed).clamp_min(0) + (guessed - high).clamp_min(0)
    return (0.5 * (beyond / std).square()).sum(1)


def unknown_noise(observed: Tensor, guessed: Tensor) -> Tensor:
    """Return the loss under noise of unknown strength on an unknown multiple of the guess, maximized over both.

    It is n / 2 times the log squared sine of the angle between the two.
    """
    size = observed.square().sum(1) * guessed.square().sum(1)
    cosine = (observed * guessed).sum(1).square() / size.clamp_min(torch.finfo(size.dtype).tiny)
    return 0.5 * observed.shape[1] * torch.log((1 - cosine).clamp_min(1e-9))
