"""The Bayesian privacy loss of FDL-PP."""

from collections.abc import Callable

import torch
from torch import Tensor

from fl_privacy.errors import UserError

BINS, SMOOTHING = 10, 1.0


def bpki(guesses: Tensor, truths: Tensor, *, bins: int = BINS, smoothing: float = SMOOTHING) -> Tensor:
    """``KL(F0 || FA)`` per image (Gu et al. 2021, A.4): how far its pixel values are from telling nothing.

    F0 is uniform over ``bins`` equal intervals of [0, 1], FA the histogram of the guessed pixels over them. The paper
    gives neither the number of intervals nor what becomes of empty ones.

    Args:
        guesses: (N, C, H, W) in [0, 1].
        truths: unused.
        bins: k.
        smoothing: pixels added to each interval, so that none is empty.

    Returns:
        (N,) float64 from 0.
    """
    pixels = guesses.flatten(1).double()
    interval = (pixels * bins).floor().clamp(0, bins - 1).long()
    counts = pixels.new_zeros(len(pixels), bins).scatter_add_(1, interval, torch.ones_like(pixels)) + smoothing
    found = counts / counts.sum(1, keepdim=True)
    return -(bins * found).log().mean(1)


def bayesian_privacy_loss(*, bins: int = BINS, smoothing: float = SMOOTHING) -> Callable[[Tensor, Tensor], Tensor]:
    """The metric :func:`bpki` with other bins: (guesses, truths) -> (N,), the truths unused.

    Raises:
        UserError: ``bins`` is below 2, or ``smoothing`` not above 0.
    """
    if not isinstance(bins, int) or isinstance(bins, bool) or bins < 2:
        raise UserError(f"bpki.bins is expected to be a whole number of at least 2, but got {bins!r}; try 10.")
    if not 0 < smoothing < float("inf"):
        raise UserError(f"bpki.smoothing is expected to be above 0, but got {smoothing!r}; try 1.")
    return lambda guesses, truths: bpki(guesses, truths, bins=bins, smoothing=smoothing)
