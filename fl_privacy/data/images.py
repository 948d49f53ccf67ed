"""Decoding of images into one tensor of bytes with a common size and number of channels."""

import io
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fl_privacy.data.sources import require
from fl_privacy.errors import UserError, reason_of

Cell = Mapping[str, Any]
"""An encoded image: its ``bytes``, or the ``path`` of its file."""

Fit = Literal["resize", "pad"]
"""Way to scale images to a size, see ``fit_images``."""

_GREY_MODES = ("1", "L", "LA")
DARK = 3
"""Level of 255; a data set that is nowhere brighter is refused as black."""
_CHUNK, _CHUNK_BYTES = 1024, 1 << 26
MOST_PIXELS, LONGEST = 64_000_000, 100
"""Limits of one image: pixels (several times a photograph's) and longer side relative to the shorter."""

_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, EOFError, ArithmeticError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""Errors of PIL on damaged files."""


def decode_images(
    cells: Iterable[Cell], count: int, *, image_size: int | None, channels: int | None, fit: Fit, name: str
) -> Tensor:
    """Decode ``count`` images, in chunks, to (N, C, H, W) uint8.

    Args:
        cells: encoded images in order, in any format that PIL reads.
        image_size: height and width to scale to; ``None`` keeps the common size.
        channels: 1 or 3; ``None`` takes that of the first image.

    Raises:
        UserError: an image can't be read, or their sizes differ.
    """
    images: Tensor | None = None
    chunk: list[Tensor] = []
    deep = Deep()
    done = held = 0
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
        held += pixels.numel()
        if len(chunk) == _CHUNK or held >= _CHUNK_BYTES or index == count - 1:
            fitted = _stack(chunk, image_size, fit, name)
            if images is None:
                images = torch.empty(count, *fitted.shape[1:], dtype=fitted.dtype)
            if images.shape[1:] != fitted.shape[1:]:
                raise _sizes_differ(images, fitted, name)
            images = images.to(torch.promote_types(images.dtype, fitted.dtype))
            images[done : index + 1] = fitted
            done, chunk, held = index + 1, [], 0
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


def _decode(cell: Cell, channels: int | None, which: str) -> tuple[Tensor, int]:
    """Decode an image (C, H, W), and C, to bytes or ``gray_values``; the size is checked before pixels are decoded."""
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
        upright = ImageOps.exif_transpose(picture)
        pixels = torch.from_numpy(np.array(upright.convert("L" if channels == 1 else "RGB")))
    except _UNREADABLE as error:
        raise UserError(
            f"{which} is expected to be readable by PIL, but is not: {reason_of(error)}; repair or remove it."
        ) from error
    return (pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1)).contiguous(), channels


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


_WHITE = {"whole": (255.0, 1023.0, 4095.0, 16383.0, 65535.0), "float": (1.0, 255.0, 65535.0)}
"""Usual white levels of gray pictures with more than 8 bits, by kind of number."""

LEAST_OF_WHITE = 0.25
"""Least share of a usual white level that the brightest pixel has; else the brightest pixel is white."""


@dataclass
class Deep:
    """Gray images of a data set with more than 8 bits a pixel, or signs; all share one black and one white.

    Attributes:
        places: indices of these images.
        low, high: least and largest value of all.
        whole: ``True`` if all values are whole numbers.
    """

    places: list[int] = field(default_factory=list)
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True

    def note(self, place: int, pixels: Tensor, which: str) -> None:
        """Record the range of image number ``place``, unless it is in bytes; ``UserError`` if values are not finite."""
        if pixels.dtype == torch.uint8:
            return
        if not pixels.isfinite().all():
            raise UserError(f"{which} is expected to have finite pixels, but some are none; fill them in.")
        self.places.append(place)
        self.low, self.high = min(self.low, float(pixels.min())), max(self.high, float(pixels.max()))
        self.whole = self.whole and bool((pixels == pixels.floor()).all())

    @property
    def range(self) -> tuple[float, float]:
        """Return the black and white levels: the usual ones if they fit, else the least and largest value."""
        steps = _WHITE["whole" if self.whole and self.high > 1 else "float"]
        white = next((step for step in steps if step >= self.high), math.inf)
        custom = self.low >= 0 and self.high >= LEAST_OF_WHITE * white
        return (0.0, white) if custom else (min(self.low, 0.0) if self.low >= 0 else self.low, self.high)

    def in_bytes(self, images: Tensor, name: str) -> Tensor:
        """Return all images (N, C, H, W) as bytes, and warn of the levels taken for black and white."""
        if not self.places:
            return images
        (black, white), at = self.range, torch.tensor(self.places)
        images = images.float()
        images[at] = (images[at] - black) * (255 / max(white - black, 1e-30))
        warnings.warn(
            f"{len(at)} of {len(images)} images of data set {name} have more than 8 bits a pixel, with values from"
            f" {self.low:g} to {self.high:g}; {black:g} is taken for black and {white:g} for white.",
            stacklevel=3,
        )
        return images.round().clamp(0, 255).to(torch.uint8)


def gray_values(picture: Image.Image) -> Tensor | None:
    """Return the values (H, W), float32, of a gray picture with more than 8 bits or signs; else ``None``."""
    signed = getattr(picture, "tag_v2", {}).get(_SAMPLE_FORMAT) == (_SIGNED,) and picture.mode == "L"
    if not signed and picture.mode != "F" and not picture.mode.startswith("I"):
        return None
    values = np.asarray(ImageOps.exif_transpose(picture))
    return torch.from_numpy((values.view(np.int8) if signed else values).astype(np.float32))


_SAMPLE_FORMAT, _SIGNED = 339, 2
"""TIFF's tag for the number format, and its value for signed numbers."""
