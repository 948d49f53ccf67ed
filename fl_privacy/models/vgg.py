"""VGG16 for small images, as SPN trains it."""

from fl_privacy.models.blocks import BlockNetwork


class VGG16(BlockNetwork):
    """VGG16 of SPN (Fan et al., 2020, Table 5): thirteen 3x3 convolutions, group norm, 8192 -> 256 -> K.

    As published it is ``norm="group"``. Pooling follows the first, second and last block, such that 32x32 images end
    as 4x4; the 4096 inputs that the table prints for the first linear layer are 512 x 4 x 4 = 8192. ``width`` are the
    channels of the first block. Images from 8x8 fit.
    """

    blocks = (
        ((1, 1), 3, True),
        ((2, 2), 3, True),
        ((4, 4, 4), 3, False),
        ((8, 8, 8), 3, False),
        ((8, 8, 8), 3, True),
    )
