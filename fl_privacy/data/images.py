"""Decode images into one tensor of bytes with a common size and number of channels."""

import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fl_privacy.data.deep import Deep, gray_values
from fl_privacy.data.sources import require
from fl_privacy.errors import UserError, reason_of

Cell = Mapping[str, Any]  # an encoded image: its ``bytes``, or the ``path`` of its file
Fit = Literal["resize", "pad"]  # way to scale images to a size, see ``fit_images``
_GREY_MODES = ("1", "L", "LA")
DARK = 3  # level of 255; a data set that is nowhere brighter is refused as black
_CHUNK, _CHUNK_BYTES = 1024, 1 << 26
MOST_PIXELS, LONGEST = 64_000_000, 100
"""Limits of one image: pixels (several times a photograph's) and longer side relative to the shorter."""

_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, EOFError, ArithmeticError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""Errors that PIL raises for damaged files."""


def decode_images(
    cells: Iterable[Cell], count: int, *, image_size: int | None, channels: int | None, fit: Fit, name: str
) -> Tensor:
    """Decode ``count`` images of any format that PIL reads, in chunks, to (N, C, H, W) uint8.

    ``image_size`` (height and width): ``None`` keeps the size, which all must share; ``fit``: way to scale, see
    :func:`fit_images`. ``channels`` (1 or 3): ``None`` takes those of the first image. ``UserError``, with the data
    set's ``name``, if an image can't be read, sizes differ, or memory is short.
    """
    images: Tensor | None = None
    chunk: list[Tensor] = []
    deep = Deep()
    done = pending = 0
    for index, cell in enumerate(cells):
        which = f"Image {index} of data set {name} ({cell['path'] or 'bytes'})"
        pixels, channels = _decode(cell, channels, which)
        deep.note(index, pixels, which)
        if index == 0 and hasattr(os, "sysconf"):
            size, memory = count * pixels.numel(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            size = count * channels * image_size**2 if image_size else size
            if size > memory / 2:
                raise UserError(
                    f"The {count} images of data set {name} are expected to fit into half of the memory, but take"
                    f" {size / 1e9:.1f} of {memory / 1e9:.1f} GB; set data.image_size=32, say."
                )
        chunk.append(pixels)
        pending += pixels.numel()
        if len(chunk) == _CHUNK or pending >= _CHUNK_BYTES or index == count - 1:
            fitted = _stack(chunk, image_size, fit, name)
            if images is None:
                images = torch.empty(count, *fitted.shape[1:], dtype=fitted.dtype)
            if images.shape[1:] != fitted.shape[1:]:
                raise _sizes_differ(images, fitted, name)
            images = images.to(torch.promote_types(images.dtype, fitted.dtype))
            images[done : index + 1] = fitted
            done, chunk, pending = index + 1, [], 0
    if images is None:
        raise UserError(f"Data set {name} is expected to hold images, but is empty; check data.root.")
    images = deep.in_bytes(images, name)
    if int(images.max()) <= DARK:
        raise UserError(
            f"The images of data set {name} are expected to show something, but are black: no pixel is over"
            f" {int(images.max())} of 255; scale their values, or save them with 8 bits."
        )
    return images


def fit_images(images: Tensor, size: int, fit: Fit) -> Tensor:
    """Scale images (..., C, H, W) uint8 to ``size`` x ``size`` pixels.

    ``resize`` scales the shorter side to ``size`` (bilinear, antialiased) and crops the center; ``pad`` shrinks the
    longer side to ``size`` if it is larger, never enlarges, and adds black borders.
    """
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    functional = require("torchvision.transforms.v2.functional")
    if fit == "resize":
        return cast(Tensor, functional.center_crop(functional.resize(images, [size], antialias=True), [size, size]))
    longer = max(height, width)
    if longer > size:
        height, width = max(1, round(height * size / longer)), max(1, round(width * size / longer))
        images = functional.resize(images, [height, width], antialias=True)
    left, top = (size - width) // 2, (size - height) // 2
    return cast(Tensor, functional.pad(images, [left, top, size - width - left, size - height - top]))


def _decode(cell: Cell, channels: int | None, which: str) -> tuple[Tensor, int]:
    encoded = cell["bytes"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(encoded) if encoded is not None else cell["path"])
        shorter, longer = sorted(picture.size)
        if shorter * longer > MOST_PIXELS or longer > LONGEST * shorter:
            raise UserError(
                f"{which} is expected to have at most {MOST_PIXELS / 1e6:.0f} million pixels, and no side over"
                f" {LONGEST} times the other, but has {picture.width}x{picture.height}; shrink or remove it."
            )
        if (values := gray_values(picture)) is not None:  # which Pillow's own conversion cuts off at 0 and 255
            return values.expand(channels or 1, *values.shape).contiguous(), channels or 1
        channels = channels or (1 if picture.mode in _GREY_MODES else 3)
        pixels = torch.from_numpy(np.array(ImageOps.exif_transpose(picture).convert("L" if channels == 1 else "RGB")))
    except _UNREADABLE as error:
        raise UserError(
            f"{which} is expected to be readable by PIL, but is not: {reason_of(error)}; repair or remove it."
        ) from error
    return (pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1)).contiguous(), channels


def _stack(chunk: list[Tensor], size: int | None, fit: Fit, name: str) -> Tensor:
    other = next((image for image in chunk if image.shape != chunk[0].shape), None)
    if other is None:
        return torch.stack(chunk) if size is None else fit_images(torch.stack(chunk), size, fit)
    if size is None:
        raise _sizes_differ(chunk[0], other, name)
    return torch.stack([fit_images(image, size, fit) for image in chunk])


def _sizes_differ(one: Tensor, other: Tensor, name: str) -> UserError:
    sizes = " and ".join("x".join(map(str, image.shape[-2:])) for image in (one, other))
    return UserError(
        f"The images of data set {name} are expected to have one size, but got {sizes}; set data.image_size=32, say."
    )
