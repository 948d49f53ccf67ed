"""Trained generators in files, and the state of trainings that were stopped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from fl_privacy.checks import fits
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.generator.network import GeneratorShape, ImageGenerator
from fl_privacy.generator.provenance import SIDE, Provenance
from fl_privacy.network_files import read_network, read_once, take_values

REMEDY = "make one by `fl-privacy train-generator data=NAME out=FILE`"

_SEEN = "fingerprints"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedGenerator:
    """A generator and where it comes from.

    Attributes:
        network: frozen, in evaluation mode.
        provenance: what it was trained on.
        about: the rest of its file's header.
    """

    network: ImageGenerator
    provenance: Provenance
    about: Mapping[str, str]


def save_generator(network: ImageGenerator, provenance: Provenance, file: Path, about: Mapping[str, str]) -> None:
    """Write the values and the fingerprints and, as header, architecture, provenance and ``about``, at once."""
    header = {**about, "architecture": json.dumps(network.shape.plain()), "trained_on": provenance.header()}
    values = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save({**values, _SEEN: provenance.fingerprints}, header))


def read_generator_header(file: Path) -> dict[str, str]:
    """The header of a generator's file.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    return _read(file, tensors=False)[0]


def load_generator(
    file: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TrainedGenerator:
    """The generator in ``file``, frozen; read once for each device until the file changes.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        return _load(file, torch.device(device), dtype)
    except OSError as error:
        raise _unreadable(file) from error


@read_once
def _load(file: Path, device: torch.device, dtype: torch.dtype) -> TrainedGenerator:
    header, values = _read(file, tensors=True)
    wrong = UserError(f"A generator is expected in {file}, but it holds something else or is damaged; {REMEDY}.")
    shape, provenance = _shape(header), _provenance(header, values.pop(_SEEN, None))
    if shape is None or provenance is None:
        raise wrong
    with torch.device("meta"):
        network = ImageGenerator(shape)
    if take_values(network, values) is not None:
        raise wrong
    return TrainedGenerator(network=network.to(device=device, dtype=dtype), provenance=provenance, about=header)


def _shape(header: Mapping[str, str]) -> GeneratorShape | None:
    """What ``architecture`` says, within limits; laid out before anything is allocated."""
    given = _plain(header, "architecture")
    names = {field.name for field in fields(GeneratorShape)}
    if given is None or given.keys() != names or not all(type(value) is int for value in given.values()):
        return None
    try:
        return GeneratorShape(**{name: int(str(value)) for name, value in given.items()})
    except UserError:
        return None


def _provenance(header: Mapping[str, str], seen: Tensor | None) -> Provenance | None:
    given = _plain(header, "trained_on")
    kinds: dict[str, type] = {"data": str, "split": str, "images": int, "seed": int, "steps": int}
    if given is None or given.keys() != kinds.keys() or not all(fits(given[name], kinds[name]) for name in kinds):
        return None
    if seen is None or seen.dtype != torch.uint8 or seen.dim() != 2 or seen.shape[1] != SIDE * SIDE:
        return None
    return Provenance(**given, fingerprints=seen)  # type: ignore[arg-type]


def _plain(header: Mapping[str, str], key: str) -> dict[str, object] | None:
    try:
        given = json.loads(header.get(key, ""))
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def save_training(state: Mapping[str, Tensor], file: Path, key: str) -> None:
    """Keep the ``state`` of the training ``key`` in ``file``, at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, save(dict(state), {"key": key}))


def load_training(file: Path, key: str) -> dict[str, Tensor] | None:
    """The state of the training ``key`` in ``file``; ``None`` where there is none, or one of another training."""
    if not file.is_file():
        return None
    try:
        if read_network(file, tensors=False)[0].get("key") != key:
            return None
        return read_network(file, tensors=True)[1]
    except OSError as error:
        raise UserError(f"The state of a training is expected in {file}, but it can't be read; remove it.") from error


def _read(file: Path, *, tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and, if wanted, values."""
    try:
        return read_network(file, tensors=tensors)
    except OSError as error:
        raise _unreadable(file) from error


def _unreadable(file: Path) -> UserError:
    return UserError(f"A generator is expected in {file}, but it can't be read; {REMEDY}.")
