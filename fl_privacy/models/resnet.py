"""Residual networks for small images (He et al., 2016)."""

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
    require_positive,
    resolve_strides,
)


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
