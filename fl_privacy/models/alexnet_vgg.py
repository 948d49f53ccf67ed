"""AlexNet and VGG16 for small images."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from fl_privacy import checks
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

Block = tuple[tuple[int, ...], int, bool]
"""Relative widths of its convolutions, their kernel size, and ``True`` if 2x2 pooling follows."""


class BlockNetwork(ImageNetwork):
    """Network of convolutional ``blocks``, defined by subclasses.

    Args:
        image_size: height and width, at least 2 for each pooling.
        width: unit of the blocks' widths.
        hidden: outputs of the first linear layer; ``None`` leaves one linear layer.
        activation: function after each convolution and the first linear layer, one of ``layers.ACTIVATIONS``.
        pooling: ``max`` as published, or ``avg``.
        norm: normalization before each convolution's activation: ``batch``, ``group`` or ``none``.
        last_scale: initial scale of the last normalization; below 1 it prevents divergence at larger steps.
        mean, std: normalization of the inputs, one value or one a channel.
        init: one of ``layers.INITIALIZERS``.

    Raises:
        UserError: the images are too small, a number is not positive, or ``last_scale`` has no normalization to scale.
    """

    blocks: ClassVar[tuple[Block, ...]]

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        num_classes: int,
        width: int = 64,
        hidden: int | None = 256,
        activation: str = "relu",
        pooling: str = "max",
        norm: str = "none",
        last_scale: float = 1.0,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        init: str = "default",
    ) -> None:
        super().__init__(in_channels, image_size, num_classes, mean, std)
        require_positive(width=width)
        checks.number("model.last_scale", last_scale, above=0, example=0.1)
        least = 2 ** sum(pooled for *_, pooled in self.blocks)
        require_pixels(type(self).__name__, image_size, least=least)
        layers: list[nn.Module] = []
        inner = in_channels
        for factors, kernel, pooled in self.blocks:
            for outer in (factor * width for factor in factors):
                convolution = nn.Conv2d(inner, outer, kernel, padding=kernel // 2)
                layers += [convolution, norm_2d(norm, outer), new_activation(activation)]
                inner = outer
            if pooled:
                layers.append(new_pooling(pooling))
        self.features = nn.Sequential(*layers)
        features = inner * (image_size // least) ** 2
        if hidden is None:
            self.classifier: nn.Module = nn.Linear(features, num_classes)
        else:
            require_positive(hidden=hidden)
            self.classifier = nn.Sequential(
                nn.Linear(features, hidden), new_activation(activation), nn.Linear(hidden, num_classes)
            )
        initialize(self, init)
        if last_scale != 1:
            scales = [each.weight for each in self.features if isinstance(each, nn.GroupNorm | nn.BatchNorm2d)]
            if not scales:
                raise UserError(
                    f"model.last_scale={last_scale} is expected with model.norm=group or batch, but got norm=none; set"
                    " model.last_scale=1."
                )
            nn.init.constant_(scales[-1], last_scale)


class AlexNet(BlockNetwork):
    """AlexNet of SPN (Fan et al., 2020, Table 4): five convolutions, three 2x2 poolings, 4096 -> 256 -> K.

    ``width`` is the first convolution's number of channels; the others are 3, 6, 4 and 4 times as wide. FDL-PP has
    ``hidden=None``, a single linear layer 4096 -> K. Images from 8x8 fit.
    """

    blocks = (((1,), 5, True), ((3,), 5, True), ((6, 4, 4), 3, True))


class VGG16(BlockNetwork):
    """VGG16 of SPN (Fan et al., 2020, Table 5): thirteen 3x3 convolutions, group norm, 8192 -> 256 -> K.

    As published it is ``norm="group"``. Pooling follows the first, second and last block: 32x32 images end as 4x4,
    which gives 512 x 4 x 4 = 8192 inputs of the first linear layer, not the table's 4096. ``width`` is the first
    block's number of channels. Images from 8x8 fit.
    """

    blocks = (((1, 1), 3, True), ((2, 2), 3, True), ((4, 4, 4), 3, False), ((8, 8, 8), 3, False), ((8, 8, 8), 3, True))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, projected by a 1x1 convolution if the shape changes."""

    def __init__(self, inner: int, outer: int, *, stride: int, norm: str, activation: str) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False),
            norm_2d(norm, outer),
            new_activation(activation),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            norm_2d(norm, outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), norm_2d(norm, outer))
        self.activation = new_activation(activation)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.activation(self.residual(inputs) + self.shortcut(inputs))
        return outputs


class ResNet18(ImageNetwork):
    """ResNet-18 for small images: a 3x3 stem without pooling and four stages of two basic blocks.

    Any image size and number of channels fit. DLG's and SAPAG's variant, twice differentiable everywhere, is
    ``activation="sigmoid", strides=(1, 1, 1, 1)``.

    Args:
        width: channels of the first stage; each stage doubles them.
        norm: ``batch``, ``group`` or ``none``.
        activation: one of ``layers.ACTIVATIONS``.
        strides: one for each stage; the class's own if ``None``.
        mean, std: normalization of the inputs, one value or one a channel.
        init: one of ``layers.INITIALIZERS``.
    """

    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    default_strides: ClassVar[tuple[int, ...]] = (1, 2, 2, 2)

    def __init__(
        self,
        *,
        in_channels: int,
        image_size: int,
        num_classes: int,
        width: int = 64,
        norm: str = "batch",
        activation: str = "relu",
        strides: Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        init: str = "default",
    ) -> None:
        super().__init__(in_channels, image_size, num_classes, mean, std)
        require_positive(width=width)
        strides = resolve_strides(strides, self.default_strides)
        if len(strides) != len(self.blocks):
            raise UserError(
                f"model.strides is expected to have {len(self.blocks)} values, one a stage, but got {len(strides)}."
            )
        widths = [width] + [width * 2**stage for stage in range(len(self.blocks))]
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), norm_2d(norm, width), new_activation(activation)
        )
        self.stages = nn.Sequential()
        for (inner, outer), stride, depth in zip(pairwise(widths), strides, self.blocks, strict=True):
            first = BasicBlock(inner, outer, stride=stride, norm=norm, activation=activation)
            rest = [BasicBlock(outer, outer, stride=1, norm=norm, activation=activation) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential(first, *rest))
        self.classifier = nn.Linear(widths[-1], num_classes)
        initialize(self, init)

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(self.normalize(inputs)))
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits


class ResNet10(ResNet18):
    """ResNet-10 for small images: one basic block in each of four stages."""

    blocks = (1, 1, 1, 1)


class ResNet34(ResNet18):
    """ResNet-34 for small images: 3, 4, 6 and 3 basic blocks in four stages."""

    blocks = (3, 4, 6, 3)


class ResNet20(ResNet18):
    """ResNet-20, three stages of three blocks: ResNet20-4 of "Inverting Gradients"; He et al. have ``width=16``."""

    blocks = (3, 3, 3)
    default_strides = (1, 2, 2)
