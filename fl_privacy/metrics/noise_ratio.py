"""How much of a guess is noise, as Refiner's evaluation network sees it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_privacy.evaluator import find_evaluator
from fl_privacy.metrics.registry import MetricFunction


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
