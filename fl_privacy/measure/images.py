"""Metrics of guessed images, one value for each image."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fl_privacy import checks
from fl_privacy.errors import UserError

MetricFunction = Callable[[Tensor, Tensor], Tensor]  # images (N, C, H, W) in [0, 1], or labels -> (N,)


def mse(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the mean squared error (N,), float64, of images (N, C, H, W) in [0, 1] (BPMSE in FDL-PP)."""
    return (guesses.double() - truths.double()).square().flatten(1).mean(1)


def rmse(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return ||guess - truth|| / ||truth|| per image, (N,) float64; infinite for a wrong guess at a black image."""
    difference = (guesses.double() - truths.double()).flatten(1)
    ratio: Tensor = torch.linalg.vector_norm(difference, dim=1) / torch.linalg.vector_norm(
        truths.double().flatten(1), dim=1
    )
    return ratio.nan_to_num(nan=0.0, posinf=torch.inf)


def psnr(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio (N,), float64 in dB, for a peak of 1; infinite for an exact guess.

    >>> psnr(torch.full((1, 1, 8, 8), 0.1), torch.zeros(1, 1, 8, 8)).round(decimals=3)
    tensor([20.], dtype=torch.float64)
    """
    return mse(guesses, truths).log10().mul(-10)


WINDOW = 11  # width in pixels of the Gaussian window of deviation 1.5 (Wang et al. 2004, Section III.B)


def ssim(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the mean structural similarity (N,), float64, of images (N, C, H, W) (Wang et al. 2004, Eq. 13).

    It is in [-1, 1], and NaN for images smaller than the window of 11 pixels.
    """
    if min(truths.shape[-2:]) < WINDOW:
        return torch.full((len(truths),), torch.nan, dtype=torch.float64)
    x, y = guesses.double(), truths.double()
    # average over the Gaussian windows inside
    offset = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weights = torch.softmax(-(offset**2) / (2 * 1.5**2), dim=0)
    moments = torch.stack([x, y, x * x, y * y, x * y])
    rows = functional.conv2d(moments.reshape(-1, 1, *x.shape[-2:]), weights.view(1, 1, -1, 1))
    means = functional.conv2d(rows, weights.view(1, 1, 1, -1))
    mean_x, mean_y, xx, yy, xy = means.reshape(*moments.shape[:-2], *means.shape[-2:])
    variances, covariance = xx - mean_x**2 + yy - mean_y**2, xy - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    similarity: Tensor = luminance * (2 * covariance + _C2) / (variances + _C2)
    return similarity.flatten(1).mean(1)


_C1, _C2 = 0.01**2, 0.03**2


BINS, SMOOTHING = 10, 1.0


def bpki(
    guesses: Tensor, truths: Tensor, *, bins: int = BINS, smoothing: float = SMOOTHING, prior: Tensor | None = None
) -> Tensor:
    """Return the Bayesian privacy loss ``KL(F0 || FA)`` (N,), float64, of each guess (Gu et al. 2021, Eq. 8, A.4).

    F0 is the attacker's prior of pixels over k = ``bins`` equal intervals of [0, 1], FA the histogram of a guess (C, H,
    W); ``truths`` are unused. The paper calls the loss BPKI if F0 is uniform. ``smoothing``: number of pixels added to
    each interval, so that none is empty. ``prior``: distribution F0 (k,), by default the uniform one.
    """
    counts = _pixel_counts(guesses, bins) + smoothing
    found = counts / counts.sum(1, keepdim=True)
    if prior is None:
        return -(bins * found).log().mean(1)
    known = prior.to(found)
    return (torch.xlogy(known, known) - known * found.log()).sum(1)


def pixel_histogram(images: Tensor, *, bins: int = BINS) -> Tensor:
    """Return the shares (bins,) of the pixels of all ``images`` (N, C, H, W) in ``bins`` equal intervals of [0, 1]."""
    counts = _pixel_counts(images, bins).sum(0)
    return counts / counts.sum()


def _pixel_counts(images: Tensor, bins: int) -> Tensor:
    pixels = images.flatten(1).double()
    interval = (pixels * bins).floor().clamp(0, bins - 1).long()
    return pixels.new_zeros(len(pixels), bins).scatter_add_(1, interval, torch.ones_like(pixels))


def bayesian_privacy_loss(
    *, bins: int = BINS, smoothing: float = SMOOTHING, public: Tensor | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the metric :func:`bpki`, a Bayesian privacy loss, with other settings: (guesses, truths) -> (N,).

    The prior is the histogram of ``public`` images (N, C, H, W), or uniform for ``None``. ``smoothing``: number of
    pixels added to each of the ``bins``. ``UserError`` if ``bins`` is below 2, ``smoothing`` not above 0, or no image
    is given.
    """
    checks.whole("bpki.bins", bins, at_least=2, example=10)
    checks.number("bpki.smoothing", smoothing, above=0, example=1)
    if public is not None and not len(public):
        raise UserError("bpki.prior=public is expected with public images, but got none; leave bpki.prior out.")
    prior = None if public is None else pixel_histogram(public, bins=bins)
    return lambda guesses, truths: bpki(guesses, truths, bins=bins, smoothing=smoothing, prior=prior)
