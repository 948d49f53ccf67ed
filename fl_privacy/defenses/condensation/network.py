"""The network that images are condensed with, and how such networks begin."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from fl_privacy.models import build_model
from fl_privacy.models.layers import require_pixels

Network = TypeVar("Network", bound=nn.Module)

_BLOCKS = 3


class InstanceNorm(nn.Module):
    """Normalizes each channel of each image; by plain operations, which can be differentiated twice under ``vmap``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, C, H, W) -> the same."""
        centered = inputs - inputs.mean((-2, -1), keepdim=True)
        scale = (centered.square().mean((-2, -1), keepdim=True) + 1e-5).rsqrt()
        return centered * scale * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class CondensationNet(nn.Module):
    """Three blocks of convolution, instance norm, ReLU and average pooling, and a linear layer (Zhao et al. 2021).

    Inputs are normalized: pixels minus 0.5, over 0.25.
    """

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, width: int) -> None:
        super().__init__()
        require_pixels("Condensation", image_size, least=2**_BLOCKS)
        side = image_size // 2**_BLOCKS
        layers: list[nn.Module] = []
        for block in range(_BLOCKS):
            layers += [
                nn.Conv2d(width if block else in_channels, width, 3, padding=1),
                InstanceNorm(width),
                nn.ReLU(),
                nn.AvgPool2d(2),
            ]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * side * side, num_classes)

    def embed(self, inputs: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D)."""
        embedding: Tensor = self.features(inputs).flatten(1)
        return embedding

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, K)."""
        logits: Tensor = self.classifier(self.embed(inputs))
        return logits


def fresh_network(
    kind: type[Network], images: Tensor, num_classes: int, rng: torch.Generator, **options: int
) -> Network:
    """A network of ``kind`` with initial values drawn from ``rng``, for ``images`` (..., C, H, W)."""
    network = build_model(
        kind,
        seed=int(torch.randint(2**62, (1,), generator=rng, device=rng.device)),
        in_channels=images.shape[-3],
        image_size=images.shape[-2],
        num_classes=num_classes,
        **options,
    )
    assert isinstance(network, kind)
    return network.to(images.device)
