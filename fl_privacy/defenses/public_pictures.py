"""A folder of public pictures, brought to the shape of the clients' images."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from fl_privacy.errors import UserError

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")


@cache
def read_pictures(folder: str, input_shape: tuple[int, ...]) -> Tensor:
    """(N, C, H, W) uint8: all pictures below ``folder``, in the order of their names; read once in a process.

    Raises:
        UserError: there are none, or one can't be read.
    """
    channels, height, width = input_shape
    path = Path(folder).expanduser()
    files = sorted(f for f in path.rglob("*") if f.suffix.lower() in _ENDINGS)
    if not files:
        raise UserError(
            f"defense.public is expected to be a folder of pictures ({', '.join(_ENDINGS)}), but there are none below"
            f" {folder}."
        )
    return torch.stack([_read(file, "L" if channels == 1 else "RGB", (width, height)) for file in files])


def _read(file: Path, mode: str, size: tuple[int, int]) -> Tensor:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415

    try:
        with Image.open(file) as picture:
            pixels: Tensor = pil_to_tensor(picture.convert(mode).resize(size))
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{file} is expected to be a picture, but can't be read; remove it.") from error
    return pixels


def shape_of(images: Tensor) -> tuple[int, ...]:
    """(C, H, W) of (N, C, H, W)."""
    sizes: Sequence[int] = images.shape[1:]
    return tuple(sizes)
