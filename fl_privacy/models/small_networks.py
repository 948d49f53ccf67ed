"""Networks for small images: LeNets, ConvNet, AlexNet, VGG16, ResNets, and the MLPs of SPN's theorems."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Unpack, cast

from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.models.layers import (
    ImageArguments,
    ImageNetwork,
    activation as new_activation,
    hidden_layers,
    initialize,
    norm_2d,
    pooling as new_pooling,
    require_pixels,
    require_positive,
    resolve_strides,
)


class LeNet(ImageNetwork):
    """LeNet of "Deep Leakage from Gradients" (Zhu et al., 2019): three 5x5 convolutions, a linear layer.

    As published it has ``activation="sigmoid", init="uniform_0.5"``. Any image size and number of channels fit.
    SAPAG's "LeNet-5" has ``strides=(1, 1, 1, 1)``.

    Args:
        activation: function after each convolution, one of ``layers.ACTIVATIONS``.
        width: channels of each convolution.
        strides: stride of each convolution; ``None`` takes those of the class.
    """

    default_strides: ClassVar[tuple[int, ...]] = (2, 2, 1)

    def __init__(
        self,
        *,
        activation: str = "sigmoid",
        width: int = 12,
        strides: Sequence[int] | None = None,
        **image: Unpack[ImageArguments],
    ) -> None:
        super().__init__(**image)
        strides = resolve_strides(strides, self.default_strides)
        require_positive(width=width)
        layers: list[nn.Module] = []
        side = image["image_size"]
        for (inner, outer), stride in zip(
            pairwise([image["in_channels"]] + [width] * len(strides)), strides, strict=True
        ):
            layers += [nn.Conv2d(inner, outer, 5, stride, padding=2), new_activation(activation)]
            side = (side - 1) // stride + 1
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * side * side, image["num_classes"])
        initialize(self, self.init)


class DLNet(LeNet):
    """DLNet of "Rethinking Privacy Preserving Deep Learning" (SPN, Fan et al., 2020): LeNet with a fourth convolution.

    As published it has ``activation="sigmoid", init="uniform_0.3"``; for SVHN, the activation is tanh.
    """

    default_strides = (2, 2, 1, 1)


class LeNet5(ImageNetwork):
    """LeNet of FDL-PP (Gu et al., 2021, Table 2): 5x5 convolutions with 6, 16 and 120 filters, then linear 84 and K.

    2x2 pooling (``max`` as published, or ``avg``) follows the first two convolutions; only the first pads. Images are
    at least 28x28.
    """

    def __init__(self, *, activation: str = "relu", pooling: str = "max", **image: Unpack[ImageArguments]) -> None:
        super().__init__(**image)
        require_pixels("LeNet5", image["image_size"], least=28)
        side = (image["image_size"] // 2 - 4) // 2 - 4
        self.features = nn.Sequential(
            nn.Conv2d(image["in_channels"], 6, 5, padding=2),
            new_activation(activation),
            new_pooling(pooling),
            nn.Conv2d(6, 16, 5),
            new_activation(activation),
            new_pooling(pooling),
            nn.Conv2d(16, 120, 5),
            new_activation(activation),
        )
        self.classifier = nn.Sequential(
            nn.Linear(120 * side * side, 84), new_activation(activation), nn.Linear(84, image["num_classes"])
        )
        initialize(self, self.init)


class MLP(ImageNetwork):
    """Multilayer perceptron on the pixels of images of any size, with hidden layers of ``widths``."""

    def __init__(
        self, *, widths: Sequence[int] = (256, 128), activation: str = "relu", **image: Unpack[ImageArguments]
    ) -> None:
        super().__init__(**image)
        pixels = image["in_channels"] * image["image_size"] ** 2
        self.features = hidden_layers(pixels, widths, activation, example="[256, 128]")
        self.classifier = nn.Linear([pixels, *widths][-1], image["num_classes"])
        initialize(self, self.init)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(self.normalize(inputs).flatten(1))))


Block = tuple[tuple[int, ...], int, bool]
"""Relative widths of a block's convolutions, their kernel size, and ``True`` if pooling follows."""


class BlockNetwork(ImageNetwork):
    """Network of convolutional ``blocks``, which subclasses define.

    ``UserError`` if the images are too small, a number is not positive, or ``last_scale`` has nothing to scale.

    Args:
        width: number of channels by which the blocks' relative widths are multiplied.
        hidden: outputs of the first of two linear layers; ``None`` has one linear layer.
        activation: function after each convolution and the first linear layer, one of ``layers.ACTIVATIONS``.
        pooling: ``max`` as published, or ``avg``.
        norm: normalization before each convolution's activation: ``batch``, ``group`` or ``none``.
        last_scale: initial scale of the last normalization; values below 1 prevent divergence.
    """

    blocks: ClassVar[tuple[Block, ...]]
    pool: ClassVar[int] = 2

    def __init__(
        self,
        *,
        width: int = 64,
        hidden: int | None = 256,
        activation: str = "relu",
        pooling: str = "max",
        norm: str = "none",
        last_scale: float = 1.0,
        **image: Unpack[ImageArguments],
    ) -> None:
        super().__init__(**image)
        require_positive(width=width)
        checks.number("model.last_scale", last_scale, above=0, example=0.1)
        least = self.pool ** sum(pooled for *_, pooled in self.blocks)
        require_pixels(type(self).__name__, image["image_size"], least=least)
        layers: list[nn.Module] = []
        inner = image["in_channels"]
        for factors, kernel, pooled in self.blocks:
            for outer in (factor * width for factor in factors):
                convolution = nn.Conv2d(inner, outer, kernel, padding=kernel // 2)
                layers += [convolution, norm_2d(norm, outer), new_activation(activation)]
                inner = outer
            if pooled:
                layers.append(new_pooling(pooling, self.pool))
        self.features = nn.Sequential(*layers)
        features = inner * (image["image_size"] // least) ** 2
        if hidden is None:
            self.classifier: nn.Module = nn.Linear(features, image["num_classes"])
        else:
            require_positive(hidden=hidden)
            self.classifier = nn.Sequential(
                nn.Linear(features, hidden), new_activation(activation), nn.Linear(hidden, image["num_classes"])
            )
        initialize(self, self.init)
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

    ``width`` is the first convolution's number of channels; the others have 3, 6, 4 and 4 times as many. 4096 is for
    32x32 images; the least size is 8x8. FDL-PP (Gu et al. 2021) has ``hidden=None``: one linear layer, 4096 -> K.
    """

    blocks = (((1,), 5, True), ((3,), 5, True), ((6, 4, 4), 3, True))


class VGG16(BlockNetwork):
    """VGG16 of SPN (Fan et al., 2020, Table 5): thirteen 3x3 convolutions, group norm, 8192 -> 256 -> K.

    As published it has ``norm="group"``. Pooling follows the first, second and last block, so that 32x32 images give
    8192 inputs of the first linear layer, not the table's 4096. ``width``: channels of the first block. Images are at
    least 8x8.
    """

    blocks = (((1, 1), 3, True), ((2, 2), 3, True), ((4, 4, 4), 3, False), ((8, 8, 8), 3, False), ((8, 8, 8), 3, True))


class ConvNet(BlockNetwork):
    """ConvNet of "Inverting Gradients" (Geiping et al., 2020): eight 3x3 convolutions, two 3x3 max poolings.

    Convolutions have 1, 2, 2, and five times 4 times ``width`` channels. Images must have at least 9x9 pixels.
    ``activation`` and ``norm``: see :class:`BlockNetwork`.
    """

    blocks = (((1, 2, 2, 4, 4, 4), 3, True), ((4, 4), 3, True))
    pool = 3

    def __init__(
        self, *, width: int = 64, activation: str = "relu", norm: str = "batch", **image: Unpack[ImageArguments]
    ) -> None:
        super().__init__(width=width, hidden=None, activation=activation, norm=norm, **image)


class BasicBlock(nn.Module):
    """Residual block: two 3x3 convolutions, and a shortcut with a 1x1 convolution if the shape changes."""

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
        return cast(Tensor, self.activation(self.residual(inputs) + self.shortcut(inputs)))


class ResNet18(ImageNetwork):
    """ResNet-18 for images of any size: a 3x3 convolution without pooling, and four stages of two basic blocks.

    The papers DLG and SAPAG take ``activation="sigmoid", strides=(1, 1, 1, 1)``.

    Args:
        width: channels of the first stage; each later stage has twice as many.
        norm: normalization after each convolution: ``batch``, ``group`` or ``none``.
        activation: name of the activation, one of ``layers.ACTIVATIONS``.
        strides: stride of each stage; ``None`` takes ``default_strides``.
    """

    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    default_strides: ClassVar[tuple[int, ...]] = (1, 2, 2, 2)

    def __init__(
        self,
        *,
        width: int = 64,
        norm: str = "batch",
        activation: str = "relu",
        strides: Sequence[int] | None = None,
        **image: Unpack[ImageArguments],
    ) -> None:
        super().__init__(**image)
        require_positive(width=width)
        strides = resolve_strides(strides, self.default_strides)
        if len(strides) != len(self.blocks):
            raise UserError(
                f"model.strides is expected to have {len(self.blocks)} values, but got {len(strides)}; leave it null."
            )
        widths = [width] + [width * 2**stage for stage in range(len(self.blocks))]
        self.stem = nn.Sequential(
            nn.Conv2d(image["in_channels"], width, 3, padding=1, bias=False),
            norm_2d(norm, width),
            new_activation(activation),
        )
        self.stages = nn.Sequential()
        for (inner, outer), stride, depth in zip(pairwise(widths), strides, self.blocks, strict=True):
            first = BasicBlock(inner, outer, stride=stride, norm=norm, activation=activation)
            rest = [BasicBlock(outer, outer, stride=1, norm=norm, activation=activation) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential(first, *rest))
        self.classifier = nn.Linear(widths[-1], image["num_classes"])
        initialize(self, self.init)

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(self.normalize(inputs)))
        return cast(Tensor, self.classifier(features.mean((2, 3))))


class ResNet10(ResNet18):
    """ResNet-10 for small images: one basic block in each of four stages."""

    blocks = (1, 1, 1, 1)


class ResNet34(ResNet18):
    """ResNet-34 for small images: 3, 4, 6 and 3 basic blocks in four stages."""

    blocks = (3, 4, 6, 3)


class ResNet20(ResNet18):
    """ResNet-20: three stages of three blocks, as ResNet20-4 in "Inverting Gradients"; He et al. have ``width=16``."""

    blocks = (3, 3, 3)
    default_strides = (1, 2, 2)
