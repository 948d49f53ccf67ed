"""Pixels moved about an image, where the Python Imaging Library would put them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_FIXED = 1 << 16
"""The library's nearest-neighbor sampling counts in 65,536ths of a pixel."""

_BLACK, _GREY = 0, 128
"""Of 255: what vacated pixels are filled with."""


def translate(images: Tensor, shift: tuple[int, int]) -> Tensor:
    """The pixel that was at (x + shift_x, y + shift_y) comes to (x, y); vacated pixels are black.

    Args:
        images: (..., H, W), uint8 or float in [0, 1].
        shift: in pixels, x then y.
    """
    x, y = _grid(images)
    return _gather(images, x + shift[0], y + shift[1], _BLACK)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Counterclockwise about the center, nearest pixels, as ``PIL.Image.rotate``; vacated pixels are grey."""
    height, width = images.shape[-2:]
    angle = -math.radians(degrees)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    from_x = (cosine, sine, width / 2 - cosine * width / 2 - sine * height / 2)
    from_y = (-sine, cosine, height / 2 + sine * width / 2 - cosine * height / 2)
    x, y = _grid(images)
    return _gather(images, _fixed_point(from_x, x, y), _fixed_point(from_y, x, y), _GREY)


def shear_vertically(images: Tensor, slope: float) -> Tensor:
    """Column x moves up by ``slope`` (x + 1/2) pixels, bicubic as ``PIL.Image.transform``; vacated pixels are black."""
    height = images.shape[-2]
    x, y = _grid(images)
    at = y.double() + 0.5 + slope * (x.double() + 0.5)
    below = (at - 0.5).floor()
    part = (at - 0.5 - below).to(images.dtype if images.is_floating_point() else torch.float64)
    rows = [(below.long() + k).clamp(0, height - 1) for k in (-1, 0, 1, 2)]
    taps = [_take(images, x, row).to(part.dtype) for row in rows]
    values = _cubic(taps[0], taps[1], taps[2], taps[3], part)
    inside = (at >= 0) & (at < height)
    return torch.where(inside, _like(values, images), _filling(images, _BLACK))


def _cubic(v1: Tensor, v2: Tensor, v3: Tensor, v4: Tensor, t: Tensor) -> Tensor:
    """Cubic convolution with a = -1 at ``t`` between ``v2`` and ``v3``, evaluated in the library's order."""
    return v2 + t * (v3 - v1 + t * (2 * (v1 - v2) + v3 - v4 + t * (v2 - v1 + v4 - v3)))


def _fixed_point(row: Sequence[float], x: Tensor, y: Tensor) -> Tensor:
    by_x, by_y, offset = row

    def fixed(value: float) -> int:
        return math.floor(value * _FIXED + 0.5)

    start = fixed(offset + by_x * 0.5 + by_y * 0.5)
    return (start + fixed(by_x) * x + fixed(by_y) * y) >> 16


def _grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates x and y, (H, W) int64 each."""
    height, width = images.shape[-2:]
    y, x = torch.meshgrid(
        torch.arange(height, device=images.device), torch.arange(width, device=images.device), indexing="ij"
    )
    return x, y


def _gather(images: Tensor, x: Tensor, y: Tensor, filling: int) -> Tensor:
    height, width = images.shape[-2:]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    found = _take(images, x.clamp(0, width - 1), y.clamp(0, height - 1))
    return torch.where(inside, found, _filling(images, filling))


def _take(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    index = (y * images.shape[-1] + x).flatten()
    return images.flatten(-2).index_select(-1, index).reshape(images.shape)


def _filling(images: Tensor, level: int) -> Tensor:
    """``level`` of 255 in the unit of ``images``."""
    return images.new_full((), level / 255 if images.is_floating_point() else level)


def _like(values: Tensor, images: Tensor) -> Tensor:
    """Cut to the range of uint8 ``images``, down to whole numbers; floats keep the overshoot of the interpolation."""
    return values if images.is_floating_point() else values.clamp(0, 255).to(images.dtype)
