"""The generator for the images at hand, kept by whoever asks again and again."""

from collections.abc import Sequence
from pathlib import Path

import torch

from fl_privacy.errors import UserError
from fl_privacy.files import user_cache_folder
from fl_privacy.generator.faces import FACES, expect_faces, load_faces
from fl_privacy.generator.store import REMEDY, TrainedGenerator, load_generator, read_generator_header


def find_generator(
    path: str | None, image: Sequence[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TrainedGenerator:
    """The generator in the file ``path``, or the one of a package that ``path`` names.

    Args:
        path: of a file that ``fl-privacy train-generator`` wrote; ``faces`` is that of the package gan-face-generate.
        image: (C, H, W) that it is to make.
        device: where to.
        dtype: of its values.

    Raises:
        UserError: there is none, or it makes other images.
    """
    channels, height, width = image
    wanted = f"{channels}x{height}x{width}"
    if path is None:
        raise UserError(
            f"A generator of images of {wanted} is expected, but got none; {REMEDY}, then set attack.generator=FILE"
            f"{_kept(f'generator-*-{wanted}-*.safetensors')}."
        )
    device = torch.device(device)
    found = load_faces(device, dtype) if path == FACES else load_generator(Path(path).expanduser(), device, dtype)
    if found.network.shape.image != tuple(image):
        got = "x".join(map(str, found.network.shape.image))
        raise UserError(
            f"A generator of images of {wanted} is expected, but {path} makes {got}; bring the data to its shape by"
            f" data.channels={found.network.shape.channels} data.image_size={found.network.shape.size}, or {REMEDY}."
        )
    return found


def expect_generator(path: str | None) -> None:
    """Raise ``UserError`` where ``path`` names a file that can't be read, or a package that is missing."""
    if path == FACES:
        expect_faces()
    elif path is not None:
        read_generator_header(Path(path).expanduser())


def _kept(pattern: str) -> str:
    """What was trained before, for the remedy."""
    files = sorted(user_cache_folder().glob(pattern))
    return f", such as {files[-1]}" if files else ""
