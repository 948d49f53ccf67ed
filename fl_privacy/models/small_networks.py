"""Small networks of the papers: LeNets, the ConvNet of Inverting Gradients, and the MLPs of SPN's theorems."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.models.layers import (
    ImageNetwork,
    activation as new_activation,
    initialize,
    norm_2d,
    pooling as new_pooling,
    require_pixels,
    require_positive,
    resolve_strides,
)


class LeNet(ImageNetwork):
    """LeNet of "Deep Leakage from Gradients" (Zhu et al., 2019): three 5x5 convolutions with 12 channels.

    As published it is ``activation="sigmoid", init="uniform_0.5"``. Any image size and number of channels fit.
    SAPAG's "LeNet-5" is ``strides=(1, 1, 1, 1)``.

    Args:
        activation: function after each convolution, one of ``layers.ACTIVATIONS``.
        width: channels of each convolution.
        strides: one for each convolution; the class's own if ``None``.
        mean, std: normalization of the inputs, one value or one a channel.
        init: one of ``layers.INITIALIZERS``.
    """

    default_strides: ClassVar[tuple[int, ...]] = (2, 2, 1)

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        num_classes: int,
        activation: str = "sigmoid",
        width: int = 12,
        strides: Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        init: str = "default",
    ) -> None:
        super().__init__(in_channels, image_size, num_classes, mean, std)
        strides = resolve_strides(strides, self.default_strides)
        require_positive(width=width)
        layers: list[nn.Module] = []
        side = image_size
        for (inner, outer), stride in zip(pairwise([in_channels] + [width] * len(strides)), strides, strict=True):
            layers += [nn.Conv2d(inner, outer, 5, stride, padding=2), new_activation(activation)]
            side = (side - 1) // stride + 1
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * side * side, num_classes)
        initialize(self, init)


class DLNet(LeNet):
    """DLNet of "Rethinking Privacy Preserving Deep Learning" (SPN, Fan et al., 2020): LeNet with a fourth convolution.

    As published it is ``activation="sigmoid", init="uniform_0.3"`` (tanh for SVHN).
    """

    default_strides = (2, 2, 1, 1)


class LeNet5(ImageNetwork):
    """LeNet of FDL-PP (Gu et al., 2021, Table 2): convolutions 6, 16 and 120 of 5x5, then linear 84 and K.

    2x2 pooling follows the first two convolutions; only the first pads: 28x28 images end as 1x1. Any number of channels
    and images from 28x28 fit.

    Args:
        activation: function after each layer but the last, one of ``layers.ACTIVATIONS``.
        pooling: ``max`` as published, or ``avg``.
        mean, std: normalization of the inputs, one value or one a channel.
        init: one of ``layers.INITIALIZERS``.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        num_classes: int,
        activation: str = "relu",
        pooling: str = "max",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        init: str = "default",
    ) -> None:
        super().__init__(in_channels, image_size, num_classes, mean, std)
        require_pixels("LeNet5", image_size, least=28)
        side = (image_size // 2 - 4) // 2 - 4
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5, padding=2),
            new_activation(activation),
            new_pooling(pooling),
            nn.Conv2d(6, 16, 5),
            new_activation(activation),
            new_pooling(pooling),
            nn.Conv2d(16, 120, 5),
            new_activation(activation),
        )
        self.classifier = nn.Sequential(
            nn.Linear(120 * side * side, 84), new_activation(activation), nn.Linear(84, num_classes)
        )
        initialize(self, init)


_WIDTHS = (1, 2, 2, 4, 4, 4, 4, 4)
_POOLED = (5, 7)


class ConvNet(ImageNetwork):
    """ConvNet of "Inverting Gradients" (Geiping et al., 2020): eight 3x3 convolutions, two 3x3 max poolings.

    Channels are 1, 2, 2, then five times 4 times ``width``; as published, ``width=64`` and batch norm.

    Args:
        image_size: height and width of the images, at least 9.
        width: channels of the first convolution.
        activation: function after each convolution, one of ``layers.ACTIVATIONS``.
        norm: normalization before each activation: ``batch``, ``group`` or ``none``.
        mean, std: normalization of the inputs, one value or one a channel.
        init: one of ``layers.INITIALIZERS``.
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
        super().__init__(in_channels, image_size, num_classes, mean, std)
        require_positive(width=width)
        require_pixels("ConvNet", image_size, least=9)
        side = image_size // 3 // 3
        widths = [in_channels, *(factor * width for factor in _WIDTHS)]
        layers: list[nn.Module] = []
        for depth, (inner, outer) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(inner, outer, 3, padding=1), norm_2d(norm, outer), new_activation(activation)]
            if depth in _POOLED:
                layers.append(nn.MaxPool2d(3))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1] * side * side, num_classes)
        initialize(self, init)


class MLP(ImageNetwork):
    """Multilayer perceptron on the pixels. Any image size and number of channels fit.

    Args:
        widths: widths of the hidden layers.
        activation: function after each hidden layer, one of ``layers.ACTIVATIONS``.
        mean, std: normalization of the inputs, one value or one a channel.
        init: one of ``layers.INITIALIZERS``.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        num_classes: int,
        widths: Sequence[int] = (256, 128),
        activation: str = "relu",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        init: str = "default",
    ) -> None:
        super().__init__(in_channels, image_size, num_classes, mean, std)
        if not isinstance(widths, Sequence):
            raise UserError(f"model.widths is expected to be a list such as [256, 128], but got {widths}.")
        require_positive(**{f"widths[{i}]": width for i, width in enumerate(widths)})
        sizes = [in_channels * image_size**2, *widths]
        layers = [(nn.Linear(inner, outer), new_activation(activation)) for inner, outer in pairwise(sizes)]
        self.features = nn.Sequential(*(module for layer in layers for module in layer))
        self.classifier = nn.Linear(sizes[-1], num_classes)
        initialize(self, init)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(self.normalize(inputs).flatten(1)))
        return logits
