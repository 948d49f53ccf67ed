"""Distances between images, one value each."""

from collections.abc import Callable

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.errors import UserError

MetricFunction = Callable[[Tensor, Tensor], Tensor]
"""(guesses, truths) -> (N,), of images (N, C, H, W) in [0, 1] or of labels."""


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


WINDOW = 11
"""Width in pixels of the Gaussian window (standard deviation 1.5) that torchmetrics takes."""


def ssim(guesses: Tensor, truths: Tensor) -> Tensor:
    """Mean structural similarity over the windows that lie inside the image (Wang et al. 2004, Eq. 13).

    Args:
        guesses: (N, C, H, W) in [0, 1].
        truths: (N, C, H, W) in [0, 1].

    Returns:
        (N,) float64 in [-1, 1]; NaN for images smaller than the window of 11 pixels.

    Raises:
        UserError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure  # noqa: PLC0415
    except ImportError as error:
        raise UserError("SSIM needs torchmetrics, which is not installed; run `pip install torchmetrics`.") from error
    if min(truths.shape[-2:]) < WINDOW:
        return torch.full((len(truths),), torch.nan, dtype=torch.float64)
    _, similarity = structural_similarity_index_measure(
        guesses.float(), truths.float(), sigma=1.5, data_range=1.0, return_full_image=True
    )
    border = WINDOW // 2
    inside: Tensor = similarity[..., border:-border, border:-border]
    return inside.flatten(1).double().mean(1)


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
    checks.whole("bpki.bins", bins, at_least=2, example=10)
    checks.number("bpki.smoothing", smoothing, above=0, example=1)
    return lambda guesses, truths: bpki(guesses, truths, bins=bins, smoothing=smoothing)
