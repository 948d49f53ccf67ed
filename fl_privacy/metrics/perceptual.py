"""The network of LPIPS 0.1 (Zhang et al. 2018); the package lpips has its weights, but imports PyTorch's compiler."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS = {0: (4, 2), 3: (1, 2), 6: (1, 1), 8: (1, 1), 10: (1, 1)}
"""Of AlexNet, by number among its features -> stride, padding."""

POOLED = (3, 6)
"""Those that see the maxima of 3x3 pixels, two pixels apart."""

SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""Of the colors in [-1, 1] that AlexNet was trained with."""


class PerceptualDistance(nn.Module):
    """How far two images are apart in AlexNet's features, each channel weighted as people see it (equation 1).

    Args:
        features: ``features.0.weight`` and so on of AlexNet.
        heads: ``lin0.model.1.weight`` and so on, (1, channels, 1, 1), of its five layers.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, features: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> None:
        super().__init__()
        for place, layer in enumerate(CONVOLUTIONS):
            self.register_buffer(f"weight{place}", features[f"features.{layer}.weight"])
            self.register_buffer(f"bias{place}", features[f"features.{layer}.bias"])
            self.register_buffer(f"head{place}", heads[f"lin{place}.model.1.weight"])
        self.register_buffer("shift", torch.tensor(SHIFT).view(3, 1, 1))
        self.register_buffer("scale", torch.tensor(SCALE).view(3, 1, 1))

    def forward(self, ones: Tensor, others: Tensor) -> Tensor:
        """(N,) distances of images (N, 3, H, W) in [0, 1]."""
        distance = ones.new_zeros(len(ones))
        for place, (one, other) in enumerate(zip(self._layers(ones), self._layers(others), strict=True)):
            apart = (_directions(one) - _directions(other)).square()
            distance = distance + F.conv2d(apart, self.get_buffer(f"head{place}")).mean((1, 2, 3))
        return distance

    def _layers(self, images: Tensor) -> Iterator[Tensor]:
        seen = (2 * images - 1 - self.shift) / self.scale
        for place, (layer, (stride, padding)) in enumerate(CONVOLUTIONS.items()):
            if layer in POOLED:
                seen = F.max_pool2d(seen, kernel_size=3, stride=2)
            weight, bias = self.get_buffer(f"weight{place}"), self.get_buffer(f"bias{place}")
            seen = F.relu(F.conv2d(seen, weight, bias, stride=stride, padding=padding))
            yield seen


def _directions(features: Tensor) -> Tensor:
    """``features`` (N, C, H, W), at each place of length 1."""
    return features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)
