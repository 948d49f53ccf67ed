"""From encoded images to one tensor of bytes in the size and channels that a model takes."""

import io
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fl_privacy.data.source import require
from fl_privacy.errors import UserError

Cell = Mapping[str, Any]
"""An encoded image: its ``bytes``, or the ``path`` of its file."""

Fit = Literal["resize", "pad"]
"""How images are brought to a size, see ``fit_images``."""

_GREY_MODES = ("1", "L", "LA", "I", "I;16", "F")
_CHUNK = 1024


def decode_images(
    cells: Iterable[Cell],
    count: int,
    *,
    image_size: int | None,
    channels: int | None,
    fit: Fit,
    name: str,
) -> Tensor:
    """Decode ``count`` images, a chunk at a time.

    Args:
        cells: the encoded images, in order; any format that PIL reads.
        count: how many there are.
        image_size: height and width to bring them to; ``None`` keeps the size that all must then share.
        channels: 1 or 3; ``None`` takes that of the first image.
        fit: how to bring them there, see ``fit_images``.
        name: of the data set, for errors.

    Returns:
        (N, C, H, W) uint8.

    Raises:
        UserError: an image can't be read, or their sizes differ.
    """
    images: Tensor | None = None
    chunk: list[Tensor] = []
    done = 0
    for index, cell in enumerate(cells):
        picture = _open(cell, index, name)
        channels = channels or (1 if picture.mode in _GREY_MODES else 3)
        chunk.append(_to_tensor(picture, channels))
        if len(chunk) == _CHUNK or index == count - 1:
            fitted = _stack(chunk, image_size, fit, name)
            if images is None:
                images = torch.empty(count, *fitted.shape[1:], dtype=torch.uint8)
            if images.shape[1:] != fitted.shape[1:]:
                raise _sizes_differ(images, fitted, name)
            images[done : index + 1] = fitted
            done, chunk = index + 1, []
    if images is None:
        raise UserError(f"Data set {name} is expected to hold images, but is empty; check data.root.")
    return images


def fit_images(images: Tensor, size: int, fit: Fit) -> Tensor:
    """Bring images to ``size`` x ``size`` pixels.

    Args:
        images: (..., C, H, W) uint8.
        size: pixels.
        fit: ``resize`` scales the shorter side to ``size`` (bilinear, antialiased) and crops the center;
            ``pad`` shrinks the longer side to ``size`` if it is larger, never enlarges, and adds black borders.
    """
    functional = require("torchvision.transforms.v2.functional")
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    if fit == "resize":
        scaled = functional.resize(images, [size], antialias=True)
        cropped: Tensor = functional.center_crop(scaled, [size, size])
        return cropped
    longer = max(height, width)
    if longer > size:
        height, width = max(1, round(height * size / longer)), max(1, round(width * size / longer))
        images = functional.resize(images, [height, width], antialias=True)
    left, top = (size - width) // 2, (size - height) // 2
    padded: Tensor = functional.pad(images, [left, top, size - width - left, size - height - top])
    return padded


def _open(cell: Cell, index: int, name: str) -> Image.Image:
    encoded, path = cell["bytes"], cell["path"]
    try:
        picture = Image.open(io.BytesIO(encoded) if encoded is not None else path)
        ImageOps.exif_transpose(picture, in_place=True)
        return picture
    except (OSError, SyntaxError, TypeError, AttributeError, Image.DecompressionBombError) as error:
        raise UserError(
            f"Image {index} of data set {name} ({path or 'bytes'}) is expected to be readable by PIL, but is not:"
            f" {str(error).splitlines()[0]}; repair or remove it."
        ) from error


def _to_tensor(picture: Image.Image, channels: int) -> Tensor:
    pixels = torch.from_numpy(np.array(picture.convert("L" if channels == 1 else "RGB")))
    return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1)


def _stack(chunk: list[Tensor], size: int | None, fit: Fit, name: str) -> Tensor:
    same = len({image.shape for image in chunk}) == 1
    if size is None:
        if not same:
            other = next(image for image in chunk if image.shape != chunk[0].shape)
            raise _sizes_differ(chunk[0], other, name)
        return torch.stack(chunk)
    if same:
        return fit_images(torch.stack(chunk), size, fit)
    return torch.stack([fit_images(image, size, fit) for image in chunk])


def _sizes_differ(one: Tensor, other: Tensor, name: str) -> UserError:
    sizes = " and ".join("x".join(map(str, image.shape[-2:])) for image in (one, other))
    return UserError(
        f"The images of data set {name} are expected to have one size, but got {sizes}; set data.image_size=32, say."
    )
