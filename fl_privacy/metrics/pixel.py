"""Distances between pixels, one value per image."""

import torch
from torch import Tensor


def mse(guesses: Tensor, truths: Tensor) -> Tensor:
    """Mean squared error, the BPMSE of FDL-PP.

    Args:
        guesses: (N, C, H, W) in [0, 1].
        truths: (N, C, H, W) in [0, 1].

    Returns:
        (N,) float64 in [0, 1].
    """
    return (guesses.double() - truths.double()).square().flatten(1).mean(1)


def rmse(guesses: Tensor, truths: Tensor) -> Tensor:
    """||guess - truth|| / ||truth|| per image, (N,) float64; infinite for a wrong guess of a black image."""
    difference = (guesses.double() - truths.double()).flatten(1)
    ratio: Tensor = torch.linalg.vector_norm(difference, dim=1) / torch.linalg.vector_norm(
        truths.double().flatten(1), dim=1
    )
    return ratio.nan_to_num(nan=0.0, posinf=torch.inf)


def psnr(guesses: Tensor, truths: Tensor) -> Tensor:
    """Peak signal-to-noise ratio for a peak of 1, (N,) float64 in decibel; infinite for an exact guess."""
    return mse(guesses, truths).log10().mul(-10)
