"""Networks of torchvision, for any image size and number of channels."""

from typing import Any, Unpack, cast

from torch import Tensor, nn
from torchvision.models import MobileNetV2 as TorchvisionMobileNetV2, ResNet as TorchvisionResNet, VisionTransformer
from torchvision.models.resnet import Bottleneck

from fl_privacy.checks import number
from fl_privacy.errors import UserError
from fl_privacy.models.layers import BatchNorm2d, ImageArguments, ImageNetwork, initialize, require_positive


class TorchvisionNetwork(ImageNetwork):
    """Base class of torchvision's networks, which normalizes images before the network."""

    network: Any

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.network(self.normalize(inputs)))


class ViT(TorchvisionNetwork):
    """Vision transformer (Dosovitskiy et al. 2021).

    The head has PyTorch's initialization, since torchvision's zeros would make all other gradients zero.

    Args:
        patch_size: side of a patch in pixels, a divisor of ``image_size``.
        token_width: width of a token, a multiple of ``heads``.
        mlp_width: width of the hidden layer of a block.
        dropout: dropout rate in [0, 1).
    """

    def __init__(
        self,
        *,
        patch_size: int = 4,
        depth: int = 6,
        token_width: int = 192,
        heads: int = 3,
        mlp_width: int = 768,
        dropout: float = 0.0,
        **image: Unpack[ImageArguments],
    ) -> None:
        super().__init__(**image)
        require_positive(patch_size=patch_size, depth=depth, token_width=token_width, heads=heads, mlp_width=mlp_width)
        if image["image_size"] % patch_size:
            raise UserError(
                f"model.patch_size is expected to divide the image size {image['image_size']}, but got {patch_size};"
                " set data.image_size=32 and model.patch_size=4."
            )
        if token_width % heads:
            raise UserError(
                f"model.token_width is expected to be a multiple of model.heads={heads}, but got {token_width};"
                f" try {heads * max(1, token_width // heads)}."
            )
        number("model.dropout", dropout, at_least=0, below=1, example=0.1)
        self.network = VisionTransformer(
            image_size=image["image_size"],
            patch_size=patch_size,
            num_layers=depth,
            num_heads=heads,
            hidden_dim=token_width,
            mlp_dim=mlp_width,
            dropout=dropout,
            num_classes=image["num_classes"],
        )
        self.network.conv_proj = nn.Conv2d(image["in_channels"], token_width, patch_size, patch_size)
        self.network.heads.head.reset_parameters()
        initialize(self, self.init)


_BLOCKS = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
"""Expansion, channels and repetitions of each stage (Sandler et al. 2018, Table 2)."""
_STRIDES = (2, 1, 2, 2, 2, 1, 2, 1)
_SMALL_STRIDES = (1, 1, 1, 2, 2, 1, 2, 1)
_SMALL = 64


class MobileNetV2(TorchvisionNetwork):
    """MobileNetV2 (Sandler et al. 2018); images of up to 64 pixels a side are halved three times, not five times.

    Args:
        dropout: dropout rate before the classifier, in [0, 1).
    """

    def __init__(self, *, width_multiplier: float = 1.0, dropout: float = 0.0, **image: Unpack[ImageArguments]) -> None:
        super().__init__(**image)
        number("model.width_multiplier", width_multiplier, above=0, example=1.0)
        number("model.dropout", dropout, at_least=0, below=1, example=0.2)
        first, *strides = _SMALL_STRIDES if image["image_size"] <= _SMALL else _STRIDES
        self.network = TorchvisionMobileNetV2(
            image["num_classes"],
            width_mult=width_multiplier,
            inverted_residual_setting=[[*block, stride] for block, stride in zip(_BLOCKS, strides, strict=True)],
            dropout=dropout,
            norm_layer=BatchNorm2d,
        )
        stem = self.network.features[0]
        stem[0] = nn.Conv2d(image["in_channels"], stem[0].out_channels, 3, first, padding=1, bias=False)
        initialize(self, self.init)


class ResNet50(TorchvisionNetwork):
    """ResNet-50 of torchvision (He et al. 2016), for images of at least 64 pixels a side."""

    def __init__(self, **image: Unpack[ImageArguments]) -> None:
        super().__init__(**image)
        self.network = TorchvisionResNet(Bottleneck, [3, 4, 6, 3], image["num_classes"], norm_layer=BatchNorm2d)
        self.network.conv1 = nn.Conv2d(image["in_channels"], 64, 7, 2, padding=3, bias=False)
        initialize(self, self.init)
