"""The fifty image operations of ATS policies, on batches, following the Python Imaging Library."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

_FIXED = 1 << 16
"""Fixed-point unit of the library's nearest-neighbor sampling: 65,536ths of a pixel."""

_BLACK, _GREY = 0, 128
"""Levels of 255 that fill vacated pixels."""


def translate(images: Tensor, shift: tuple[int, int]) -> Tensor:
    """Move the pixel at (x + shift_x, y + shift_y) to (x, y) of images (..., H, W), uint8 or float.

    Vacated ones are black.
    """
    x, y = _grid(images)
    return _gather(images, x + shift[0], y + shift[1], _BLACK)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate counterclockwise about the center, nearest pixels, like ``PIL.Image.rotate``; vacated pixels are gray."""
    height, width = images.shape[-2:]
    angle = -math.radians(degrees)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    from_x = (cosine, sine, width / 2 - cosine * width / 2 - sine * height / 2)
    from_y = (-sine, cosine, height / 2 + sine * width / 2 - cosine * height / 2)
    x, y = _grid(images)
    return _gather(images, _fixed_point(from_x, x, y), _fixed_point(from_y, x, y), _GREY)


def shear_vertically(images: Tensor, slope: float) -> Tensor:
    """Move column x up by ``slope`` (x + 1/2) pixels, bicubic like PIL's ``transform``; vacated pixels are black."""
    height = images.shape[-2]
    x, y = _grid(images)
    at = y.double() + 0.5 + slope * (x.double() + 0.5)
    below = (at - 0.5).floor()
    part = (at - 0.5 - below).to(images.dtype if images.is_floating_point() else torch.float64)
    rows = [(below.long() + k).clamp(0, height - 1) for k in (-1, 0, 1, 2)]
    v1, v2, v3, v4 = (_take(images, x, row).to(part.dtype) for row in rows)
    # cubic convolution, a = -1, between v2 and v3, in the library's order
    values = v2 + part * (v3 - v1 + part * (2 * (v1 - v2) + v3 - v4 + part * (v2 - v1 + v4 - v3)))
    if not images.is_floating_point():  # floats keep the overshoot of the interpolation
        values = values.clamp(0, 255).to(images.dtype)
    return torch.where((at >= 0) & (at < height), values, _filling(images, _BLACK))


def _fixed_point(row: Sequence[float], x: Tensor, y: Tensor) -> Tensor:
    by_x, by_y, offset = row

    def fixed(value: float) -> int:
        return math.floor(value * _FIXED + 0.5)

    return (fixed(offset + by_x * 0.5 + by_y * 0.5) + fixed(by_x) * x + fixed(by_y) * y) >> 16


def _grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates x and y, (H, W) int64 each."""
    height, width = images.shape[-2:]
    y, x = torch.meshgrid(*(torch.arange(side, device=images.device) for side in (height, width)), indexing="ij")
    return x, y


def _gather(images: Tensor, x: Tensor, y: Tensor, filling: int) -> Tensor:
    height, width = images.shape[-2:]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return torch.where(inside, _take(images, x.clamp(0, width - 1), y.clamp(0, height - 1)), _filling(images, filling))


def _take(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return images.flatten(-2).index_select(-1, (y * images.shape[-1] + x).flatten()).reshape(images.shape)


def _filling(images: Tensor, level: int) -> Tensor:
    return images.new_full((), level / 255 if images.is_floating_point() else level)


LEVELS = 10
"""Number of equally spaced magnitudes of a kind of operation."""


def _torchvision(name: str) -> Callable[..., Any]:
    def apply(*arguments: Any) -> Any:
        return getattr(import_module("torchvision.transforms.v2.functional"), name)(*arguments)

    return apply


_invert = _torchvision("invert")


@dataclass(frozen=True)
class Kind:
    """Kind of operation.

    Attributes:
        apply: (images (..., C, H, W), signed magnitude) -> images of the same shape and type.
        low, high: magnitudes of levels 0 and 9.
        signed: ``True`` if the magnitude gets a random sign.
    """

    apply: Callable[[Tensor, float], Tensor]
    low: float = 0.0
    high: float = 0.0
    signed: bool = False

    def magnitude(self, level: int) -> float:
        return self.low + (self.high - self.low) * level / (LEVELS - 1)


@dataclass(frozen=True)
class Operation:
    """One of ATS's fifty operations.

    Attributes:
        name: key of ``KINDS``.
        level: 0 to 9.
        probability: probability in AutoAugment; ignored unless asked for.
    """

    name: str
    level: int
    probability: float

    @property
    def signed(self) -> bool:
        return KINDS[self.name].signed

    @property
    def magnitude(self) -> float:
        return KINDS[self.name].magnitude(self.level)

    def __call__(self, images: Tensor, sign: int = 1) -> Tensor:
        """Transform ``images`` (..., C, H, W), with the magnitude's ``sign`` 1 or -1 if it is ``signed``.

        On uint8 the result equals the Python Imaging Library's within rounding; on float in [0, 1] it is not rounded
        and is differentiable.
        """
        return KINDS[self.name].apply(images, self.magnitude * (sign if self.signed else 1))


def _straight_through(exact: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Make ``exact``, a staircase on uint8, differentiable: its slope on floats is taken to be 1."""

    def apply(images: Tensor) -> Tensor:
        if not images.is_floating_point():
            return exact(images)
        steps = exact((images.detach().clamp(0, 1) * 255).round().to(torch.uint8))
        return images + (steps.to(images.dtype) / 255 - images).detach()

    return apply


def _enhancement(
    exact: Callable[[Tensor, float], Tensor], away_from: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, float], Tensor]:
    """Build an operation that moves images away from a duller version, or towards it, by a share of the difference."""

    def apply(images: Tensor, change: float) -> Tensor:
        if not images.is_floating_point():
            return exact(images, 1 + change)
        moved = images + change * (images - away_from(images))
        # clamped to [0, 1] with slope 1, so that an attacker's guess does not get stuck outside
        return moved + (moved.clamp(0, 1) - moved).detach()

    return apply


def _smooth(images: Tensor) -> Tensor:
    kernel = images.new_tensor([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    inner = conv2d(images.reshape(-1, 1, *images.shape[-2:]), kernel[None, None])
    inner = inner.reshape(*images.shape[:-2], *inner.shape[-2:])
    return images + pad(inner - images[..., 1:-1, 1:-1], (1, 1, 1, 1))


_grey = _torchvision("rgb_to_grayscale")


def _solarize(images: Tensor, threshold: float) -> Tensor:
    levels = images * 255 if images.is_floating_point() else images.short()
    inverted: Tensor = _invert(images)
    return torch.where(levels < threshold, images, inverted)


def _autocontrast(images: Tensor) -> Tensor:
    if not images.is_floating_point():
        return cast(Tensor, _torchvision("autocontrast")(images))
    low, high = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
    varies = high > low
    return torch.where(varies, (images - low) / torch.where(varies, high - low, 1), images)


KINDS: Mapping[str, Kind] = {
    "shear_y": Kind(shear_vertically, high=0.3, signed=True),
    "translate_x": Kind(
        lambda images, share: translate(images, (math.floor(share * images.shape[-1] + 0.5), 0)),
        high=150 / 331,
        signed=True,
    ),
    "translate_y": Kind(
        lambda images, share: translate(images, (0, math.floor(share * images.shape[-2] + 0.5))),
        high=150 / 331,
        signed=True,
    ),
    "rotate": Kind(rotate, high=30.0),
    "color": Kind(_enhancement(_torchvision("adjust_saturation"), _grey), high=0.5, signed=True),
    "contrast": Kind(
        _enhancement(_torchvision("adjust_contrast"), lambda x: _grey(x).mean((-3, -2, -1), keepdim=True)),
        high=0.5,
        signed=True,
    ),
    "sharpness": Kind(_enhancement(_torchvision("adjust_sharpness"), _smooth), high=0.5, signed=True),
    "brightness": Kind(_enhancement(_torchvision("adjust_brightness"), torch.zeros_like), high=0.5, signed=True),
    "posterize": Kind(
        lambda images, bits: _straight_through(lambda levels: _torchvision("posterize")(levels, round(bits)))(images),
        low=8.0,
        high=4.0,
    ),
    "solarize": Kind(_solarize, low=256.0, high=0.0),
    "invert": Kind(lambda images, _: _invert(images)),
    "equalize": Kind(lambda images, _: _straight_through(_torchvision("equalize"))(images)),
    "autocontrast": Kind(lambda images, _: _autocontrast(images)),
}
"""Magnitudes: slope, share of the side, degrees, change of a factor around 1 (identity), bits, level."""

_TABLE = (
    ("invert", 7), ("contrast", 6), ("rotate", 2), ("translate_x", 9), ("sharpness", 1),
    ("sharpness", 3), ("shear_y", 2), ("translate_y", 2), ("autocontrast", 5), ("equalize", 2),
    ("shear_y", 5), ("posterize", 5), ("color", 3), ("brightness", 5), ("sharpness", 9),
    ("brightness", 9), ("translate_x", 4), ("equalize", 1), ("contrast", 7), ("sharpness", 5),
    ("color", 5), ("translate_x", 5), ("equalize", 7), ("autocontrast", 8), ("translate_y", 3),
    ("sharpness", 6), ("brightness", 6), ("color", 8), ("solarize", 0), ("invert", 0),
    ("equalize", 0), ("autocontrast", 0), ("equalize", 8), ("equalize", 4), ("color", 5),
    ("equalize", 5), ("autocontrast", 4), ("solarize", 4), ("brightness", 3), ("color", 0),
    ("solarize", 1), ("autocontrast", 0), ("translate_y", 3), ("translate_y", 4), ("autocontrast", 1),
    ("solarize", 1), ("equalize", 5), ("invert", 1), ("translate_y", 3), ("autocontrast", 1),
)  # fmt: skip

_PROBABILITIES = (
    0.1, 0.2, 0.7, 0.3, 0.8, 0.9, 0.5, 0.7, 0.5, 0.9, 0.2, 0.3, 0.4, 0.6, 0.3, 0.7, 0.6, 0.5, 0.6, 0.6,
    0.7, 0.5, 0.3, 0.4, 0.4, 0.2, 0.9, 0.2, 0.5, 0.0, 0.2, 0.6, 0.2, 0.6, 0.9, 0.6, 0.8, 0.2, 0.1, 0.7,
    0.4, 0.9, 0.9, 0.7, 0.9, 0.8, 0.8, 0.1, 0.7, 0.9,
)  # fmt: skip

OPERATIONS: tuple[Operation, ...] = tuple(
    Operation(name, level, probability) for (name, level), probability in zip(_TABLE, _PROBABILITIES, strict=True)
)
"""By index: Table 1 of Gao et al. 2023; probabilities of the CIFAR-10 policies of AutoAugment (Cubuk et al. 2019)."""

_IN_THE_CODE = {16: ("equalize", 5), 43: ("translate_y", 3), 47: ("invert", 0)}

Table = Literal["paper", "code"]
"""``paper``: Table 1. ``code``: the authors' program, which differs at 16 (equalize 5, not translateX 4), at 43
(translateY 3, not 4; Section 5.8 has 5) and at 47 (invert 0, not 1, which is the same)."""

TABLES: Mapping[Table, tuple[Operation, ...]] = {
    "paper": OPERATIONS,
    "code": tuple(
        Operation(*_IN_THE_CODE.get(index, (operation.name, operation.level)), operation.probability)
        for index, operation in enumerate(OPERATIONS)
    ),
}
"""The fifty operations by index."""
