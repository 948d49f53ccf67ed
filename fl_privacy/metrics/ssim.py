"""Structural similarity, one value per image."""

import torch
from torch import Tensor

from fl_privacy.errors import UserError

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
