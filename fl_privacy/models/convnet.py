"""The plain convolutional network of "Inverting Gradients"."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fl_privacy.models.initialization import initialize
from fl_privacy.models.layers import activation as new_activation
from fl_privacy.models.layers import input_normalization, norm_2d, require_pixels, require_positive

_WIDTHS = (1, 2, 2, 4, 4, 4, 4, 4)
_POOLED = (5, 7)


class ConvNet(nn.Module):
    """ConvNet of "Inverting Gradients" (Geiping et al., 2020): eight 3x3 convolutions, two 3x3 max poolings.

    Channels are 1, 2, 2, then five times 4 times ``width``; as published, ``width=64`` and batch norm.

    Args:
        in_channels: C of the images.
        image_size: their height and width, at least 9.
        num_classes: K.
        width: channels of the first convolution.
        activation: after each convolution, one of ``layers.ACTIVATIONS``.
        norm: before each activation: ``batch``, ``group`` or ``none``.
        mean, std: normalization of the inputs, one value or one a channel; none if ``None``.
        init: weight initialization, one of ``initialization.INITIALIZERS``.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        num_classes: int,
        width: int = 64,
        activation: str = "relu",
        norm: str = "batch",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        init: str = "default",
    ) -> None:
        super().__init__()
        require_positive(in_channels=in_channels, image_size=image_size, num_classes=num_classes, width=width)
        require_pixels("ConvNet", image_size, least=9)
        side = image_size // 3 // 3
        widths = [in_channels, *(factor * width for factor in _WIDTHS)]
        layers: list[nn.Module] = []
        for depth, (inner, outer) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(inner, outer, 3, padding=1), norm_2d(norm, outer), new_activation(activation)]
            if depth in _POOLED:
                layers.append(nn.MaxPool2d(3))
        self.normalize = input_normalization(mean, std, in_channels)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1] * side * side, num_classes)
        initialize(self, init)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> logits (B, K)."""
        logits: Tensor = self.classifier(self.features(self.normalize(inputs)).flatten(1))
        return logits
