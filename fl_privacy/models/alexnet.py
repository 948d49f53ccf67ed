"""AlexNet for small images, as SPN and FDL-PP train it."""

from fl_privacy.models.blocks import BlockNetwork


class AlexNet(BlockNetwork):
    """AlexNet of SPN (Fan et al., 2020, Table 4): five convolutions, three 2x2 poolings, 4096 -> 256 -> K.

    ``width`` are the channels of the first convolution; the others are 3, 6, 4 and 4 times as wide. FDL-PP's is
    ``hidden=None``: a single linear layer 4096 -> K. Images from 8x8 fit.
    """

    blocks = (((1,), 5, True), ((3,), 5, True), ((6, 4, 4), 3, True))
