"""Find black and white levels of gray pictures with more than 8 bits, signed or floating-point values."""

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fl_privacy.errors import UserError

_WHITE = {"whole": (255.0, 1023.0, 4095.0, 16383.0, 65535.0), "float": (1.0, 255.0, 65535.0)}
"""Usual white levels of gray pictures with more than 8 bits, by kind of number."""

LEAST_OF_WHITE = 0.25
"""Least share of a usual white level that the brightest pixel has to reach; else that pixel counts as white."""


@dataclass
class Deep:
    """Range of gray values in a data set's images with signed or more than 8-bit pixels, to scale them alike."""

    places: list[int] = field(default_factory=list)  # indices of these images
    low: float = math.inf  # least value of all these images
    high: float = -math.inf  # largest value
    whole: bool = True  # ``True`` if all values are whole numbers

    def note(self, place: int, pixels: Tensor, which: str) -> None:
        if pixels.dtype == torch.uint8:
            return
        if not pixels.isfinite().all():
            raise UserError(f"{which} is expected to have finite pixels, but some are none; fill them in.")
        self.places.append(place)
        self.low, self.high = min(self.low, float(pixels.min())), max(self.high, float(pixels.max()))
        self.whole = self.whole and bool((pixels == pixels.floor()).all())

    @property
    def range(self) -> tuple[float, float]:
        steps = _WHITE["whole" if self.whole and self.high > 1 else "float"]
        white = next((step for step in steps if step >= self.high), math.inf)
        custom = self.low >= 0 and self.high >= LEAST_OF_WHITE * white
        return (0.0, white) if custom else (min(self.low, 0.0) if self.low >= 0 else self.low, self.high)

    def in_bytes(self, images: Tensor, name: str) -> Tensor:
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
    """Return the values (H, W) float32 of a gray picture with signed values or more than 8 bits; else ``None``."""
    signed = getattr(picture, "tag_v2", {}).get(_SAMPLE_FORMAT) == (_SIGNED,) and picture.mode == "L"
    if not signed and picture.mode != "F" and not picture.mode.startswith("I"):
        return None
    values = np.asarray(ImageOps.exif_transpose(picture))
    return torch.from_numpy((values.view(np.int8) if signed else values).astype(np.float32))


_SAMPLE_FORMAT, _SIGNED = 339, 2  # TIFF's tag for the number format, and its value for signed numbers
