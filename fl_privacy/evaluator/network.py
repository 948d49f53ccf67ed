"""The evaluation network: how much of an image is noise?"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError


class EvaluationNetwork(nn.Module):
    """D of Refiner (Fan et al. 2025, appendix D): three strided 3x3 convolutions, a linear layer, a sigmoid.

    Args:
        input_shape: (C, H, W) of the images it judges.
        widths: filters of the convolutions.
    """

    def __init__(self, *, input_shape: Sequence[int], widths: Sequence[int] = (128, 256, 512)) -> None:
        super().__init__()
        if len(input_shape) != 3 or min(*input_shape, *widths) < 1:
            raise UserError(
                f"An evaluation network is expected to get a shape (C, H, W) and widths of at least 1, but got"
                f" {tuple(input_shape)} and {tuple(widths)}."
            )
        self.input_shape, self.widths = tuple(input_shape), tuple(widths)
        channels, height, width = input_shape
        layers: list[nn.Module] = []
        self.multiply_adds = 0
        """Of one image."""
        for inner, outer in pairwise([channels, *widths]):
            layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.ReLU()]
            height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
            self.multiply_adds += 9 * inner * outer * height * width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1] * height * width, 1)
        self.multiply_adds += self.head.in_features

    def logits(self, images: Tensor) -> Tensor:
        """(N, C, H, W) in [0, 1] -> (N,), the log odds of noise."""
        logits: Tensor = self.head(self.features(images).flatten(1)).squeeze(1)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) in [0, 1] -> (N,) predicted noise ratio in [0, 1]."""
        return torch.sigmoid(self.logits(images))
