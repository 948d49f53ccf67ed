"""Intercepted updates on disk, in safetensors and JSON for their owner only; all file contents are validated.

``FOLDER/round-1/client-2/victim-0.json`` describes an observation and names its tensors by their file's SHA-256,
``FOLDER/tensors/DIGEST.safetensors``.
"""

import json
import math
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from fl_privacy.checks import fits
from fl_privacy.effects import from_plain
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import MOST_EXAMPLES
from fl_privacy.files.foreign import expect_regular_files
from fl_privacy.models.unwrap_model import once_each
from fl_privacy.types import Knowledge, LocalPlan, ModelState, Observation, Tensors, Upload, VictimId

FORMAT = 1  # version of the layout
PARAMETERS, BUFFERS, UPDATE = "parameters/", "buffers/", "update/"  # prefixes of names in the tensor files

KNOWN = ("labels", "public_images", "public_labels", "previous", "features")
KNOWN_STATES = ("private", "front")
"""Fields of ``Knowledge`` with tensors; a model state's names begin with its field, as ``private_parameters/``."""

MOST_JSON, MOST_TENSORS = 1 << 20, 1 << 30
"""Most bytes of a description, and of a tensor file beyond sixteen times the model's size."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def with_prefix(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Add ``prefix`` to the names of ``tensors``."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``, which is removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def tensor_file(folder: Path, digest: str) -> Path:
    """Return the path of the tensors whose file has the SHA-256 ``digest``."""
    return folder / "tensors" / f"{digest}.safetensors"


@dataclass(frozen=True)
class CaptureFile:
    """Intercepted upload on disk: a description and tensors, whose content is not trusted.

    Every method raises ``UserError`` if a file is missing, too large or damaged. If ``finite`` is set, tensors with
    infinite or NaN values are also refused.
    """

    folder: Path
    path: Path
    finite: bool = True  # ``True`` refuses values that are not finite

    def json(self) -> dict[str, Any]:
        try:
            raw = json.loads(self._read(self.path, MOST_JSON))
        except (ValueError, RecursionError):
            self.refuse("is no JSON")
        if not isinstance(raw, dict):
            self.refuse("describes no observation")
        return raw

    def digest(self, raw: Mapping[str, Any], key: str) -> str:
        value = raw.get(key)
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            self.refuse(f"names no tensors for {key}")
        return value

    def tensors(self, digest: str, room: int) -> dict[str, Tensor]:
        """Load and verify the tensors with SHA-256 ``digest``; refuse files above ``MOST_TENSORS`` + ``room`` bytes."""
        path = tensor_file(self.folder, digest)
        data = self._read(path, MOST_TENSORS + room)
        if sha256(data).hexdigest() != digest:
            self.refuse(f"has damaged tensors in {path.name}")
        try:
            tensors = load(data)
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, AttributeError):
            self.refuse(f"has tensors in {path.name} that are no safetensors of PyTorch's types")
        for name, tensor in tensors.items():
            if self.finite and tensor.is_floating_point() and not tensor.isfinite().all():
                self.refuse(f"holds {name} with values that are not finite")
        return {name: tensor.clone() for name, tensor in tensors.items()}  # alignment affects last bits

    def refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{self.path} is expected to be a captured update of the model given, but {what};"
            " choose the model it was captured with, or remove the file."
        )

    def _read(self, path: Path, most: int) -> bytes:
        try:
            if not path.is_file():
                self.refuse(f"{path.name} is no file")
            if path.stat().st_size > most:
                self.refuse(f"{path.name} is larger than any such file ({most >> 20} MiB)")
            return path.read_bytes()
        except OSError as error:
            self.refuse(f"can't be read in whole ({path.name}: {error.strerror})")


Change = Callable[[Observation], Observation]


class LazyObservations(Sequence[Observation], ABC):
    """Sequence of intercepted uploads, each loaded from disk on access; a slice loads nothing."""

    ids: Sequence[VictimId]

    @abstractmethod
    def load(self, place: int) -> Observation:
        """Load the observation at ``place``, from 0."""

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> Observation: ...

    @overload
    def __getitem__(self, place: slice) -> "LazyObservations": ...

    def __getitem__(self, place: int | slice) -> "Observation | LazyObservations":
        places = range(len(self))[place]
        return self.load(places) if isinstance(places, int) else _Some(self, places)


class _Some(LazyObservations):
    def __init__(self, whole: Sequence[Observation], places: Sequence[int], changed: Change | None = None) -> None:
        self._whole, self._places, self._changed = whole, places, changed
        known = ids_of(whole)
        self.ids = [known[place] for place in places]

    def load(self, place: int) -> Observation:
        found = self._whole[self._places[place]]
        return self._changed(found) if self._changed else found


def only(observations: Sequence[Observation], wanted: Callable[[VictimId], bool]) -> Sequence[Observation]:
    """Select the observations for whose id ``wanted`` returns ``True``, without loading any."""
    return _Some(observations, [place for place, id in enumerate(ids_of(observations)) if wanted(id)])


def by_id(observations: Sequence[Observation]) -> Sequence[Observation]:
    """Sort the observations by id, without loading any."""
    ids = ids_of(observations)
    return _Some(observations, sorted(range(len(ids)), key=ids.__getitem__))


def changed(observations: Sequence[Observation], change: Change) -> Sequence[Observation]:
    """Apply a change to each observation as it is loaded."""
    return _Some(observations, range(len(observations)), change)


def ids_of(observations: Sequence[Observation]) -> Sequence[VictimId]:
    """Return the observations' ids, if possible without loading the observations."""
    return observations.ids if isinstance(observations, LazyObservations) else [o.id for o in observations]


K = TypeVar("K")
V = TypeVar("V")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # types of parameters and images


def load_observations(folder: Path | str, model: nn.Module, *, inside: nn.Module | None = None) -> list[Observation]:
    """Load all captured updates of a run or an audit into memory, in the order of their ids.

    ``folder``: folder of a run with ``intercept.save=true``, or of an audit. ``model``: architecture that the clients
    were sent. ``inside``: architecture of a client that colludes with the attacker, if it differs. ``UserError`` if
    there are none, a file is missing or damaged, or they do not fit ``model``.
    """
    return list(stored_observations(folder, model, inside=inside))


def stored_observations(
    folder: Path | str, model: nn.Module, *, inside: nn.Module | None = None
) -> "StoredObservations":
    """Return the captured uploads below ``folder``, each loaded on access; see :func:`load_observations`.

    ``model``: architecture that clients were sent. ``inside``: that of a colluding client, with its private layers.
    """
    folder = Path(folder)
    audits = [path for path in folder.glob(f"audit-*/{_CAPTURES}") if path.is_dir()]
    if (folder / _CAPTURES).is_dir():
        folder = folder / _CAPTURES
    elif len(audits) == 1:
        folder = audits[0]
    if folder.is_dir():
        expect_regular_files(folder)
    paths = list(folder.rglob("*.json"))
    if not paths:
        raise UserError(f"Captured updates are expected in {folder}, but there are none; run with intercept.save=true.")
    return StoredObservations(folder, sorted(_named(folder, path) for path in paths), model, inside)


_CAPTURES = "captures"  # folder of captured updates within that of a run or of an audit


def _named(folder: Path, path: Path) -> VictimId:
    try:
        return VictimId.parse(path.relative_to(folder).with_suffix("").as_posix())
    except ValueError:
        CaptureFile(folder, path).refuse("its name is not round-R/client-C or round-R/client-C/victim-K")


class StoredObservations(LazyObservations):
    """Observations in files, loaded one at a time."""

    def __init__(self, folder: Path, ids: Sequence[VictimId], model: nn.Module, inside: nn.Module | None) -> None:
        self.ids = list(ids)
        self._folder, self._models = folder, (model, model if inside is None else inside)
        self._shared = Shared()

    def load(self, place: int) -> Observation:
        return read_observation(self._folder, self.ids[place], *self._models, self._shared)


MOST_SHARED = 4  # largest number of values of a kind in a cache


@dataclass(frozen=True)
class Shared:
    """Cache of the latest models and attackers' knowledge, which consecutive observations have in common."""

    states: dict[str, ModelState] = field(default_factory=dict)
    knowledge: dict[tuple[str, str], Knowledge] = field(default_factory=dict)

    @staticmethod
    def get(kept: dict[K, V], key: K, make: Callable[[], V]) -> V:
        if key not in kept:
            while len(kept) >= MOST_SHARED:
                del kept[next(iter(kept))]
            kept[key] = make()
        return kept[key]


def read_observation(
    folder: Path, id: VictimId, model: nn.Module, inside: nn.Module, shared: Shared, *, finite: bool = True
) -> Observation:
    """Load the captured update ``id`` and the attacker's knowledge of it.

    ``model``: architecture that the clients were sent. ``inside``: that of a client colluding with the attacker, with
    its private layers. ``shared``: cache for loading several observations. ``finite``: ``True`` refuses infinite and
    NaN values. ``UserError`` if a file is missing, damaged, or does not fit the model.
    """
    return _Reader(CaptureFile(folder, folder / f"{id}.json", finite), id, model, inside).observation(shared)


class _Reader:
    def __init__(self, file: CaptureFile, id: VictimId, model: nn.Module, inside: nn.Module) -> None:
        self.file, self.id, self.model, self.inside = file, id, model, inside

    def observation(self, shared: Shared) -> Observation:
        raw = self.file.json()
        if raw.get("format") != FORMAT or isinstance(raw["format"], bool):
            self.file.refuse(f"has format {raw.get('format')!r} where {FORMAT} is expected")
        if raw.get("id") != str(self.id):
            self.file.refuse(f"is of the observation {raw.get('id')!r}")
        given = json.dumps([raw.get(key) for key in ("defense", "same_data", "colluder", "features_at")])
        sent, known = self.file.digest(raw, "sent"), (self.file.digest(raw, "knowledge"), given)
        if raw.get("colluder") is not None:
            self.model = self.inside
        knowledge = shared.get(shared.knowledge, known, lambda: self._knowledge(raw))
        return Observation(
            id=self.id,
            model=self.model,
            sent=shared.get(shared.states, sent, lambda: self._state(sent, knowledge.private)),
            upload=self._upload(raw),
            plan=self._plan(raw.get("plan")),
            input_shape=self._shape(raw.get("input_shape")),
            num_classes=self._count(raw, "num_classes"),
            knowledge=knowledge,
        )

    def _state(self, digest: str, private: ModelState | None) -> ModelState:
        parameters, buffers = self._split(digest, PARAMETERS, BUFFERS)
        assumed = parameters if private is None else {**parameters, **private.parameters}
        if missing := [name for name, _ in self.model.named_parameters() if name not in assumed]:
            self.file.refuse(f"was sent no parameter {missing[0]}, which the model given has")
        return ModelState(self._parameters(parameters), self._buffers(buffers))

    def _upload(self, raw: Mapping[str, Any]) -> Upload:
        update, buffers = self._split(self.file.digest(raw, "upload"), UPDATE, BUFFERS)
        if not update:
            self.file.refuse("was answered with no parameter at all")
        rounding = raw.get("rounding")
        if not isinstance(rounding, float) or not 0 <= rounding < math.inf:
            self.file.refuse(f"has the rounding {rounding!r}")
        tensors, held = self._parameters(update), self._buffers(buffers)
        return Upload(tensors=tensors, buffers=held, num_examples=self._count(raw, "num_examples"), rounding=rounding)

    def _knowledge(self, raw: Mapping[str, Any]) -> Knowledge:
        tensors = self._tensors(self.file.digest(raw, "knowledge"))
        known: dict[str, Any] = {name: tensors.get(name) for name in KNOWN}
        labels, images, classes, previous, features = known.values()
        self._expect_images(images, "public images", raw)
        self._expect_images(previous, "a previous reconstruction", raw)
        self._expect_classes(labels, "labels", raw)
        if labels is not None and len(labels) > self._count(raw, "num_examples"):
            self.file.refuse(f"has {len(labels)} labels of {raw['num_examples']} examples")
        self._expect_classes(classes, "classes of public images", raw)
        if classes is not None and (images is None or classes.shape != images.shape[:1]):
            self.file.refuse(f"has classes of public images of shape {tuple(classes.shape)}")
        if features is not None and features.dtype not in FLOATS:
            self.file.refuse(f"has features of type {features.dtype}")
        same_data = raw.get("same_data")
        if not isinstance(same_data, str | None):
            self.file.refuse(f"has the name {same_data!r} for its examples")
        colluder = raw.get("colluder")
        if not fits(colluder, int | None):
            self.file.refuse(f"has the colluding client {colluder!r}")
        features_at = raw.get("features_at")
        if not isinstance(features_at, str | None) or (
            features_at and features_at not in dict(self.model.named_modules())
        ):
            self.file.refuse(f"has features that enter {features_at!r}")
        try:
            defense = None if (plain := raw.get("defense")) is None else from_plain(plain)
        except UserError as error:
            self.file.refuse(f"has a defense in an unknown form: {error}")
        for name in KNOWN_STATES:
            values, held = (without_prefix(f"{name}_{prefix}", tensors) for prefix in (PARAMETERS, BUFFERS))
            known[name] = ModelState(self._parameters(values), self._buffers(held)) if values or held else None
        return Knowledge(defense=defense, same_data=same_data, colluder=colluder, features_at=features_at, **known)

    def _expect_images(self, images: Tensor | None, what: str, raw: Mapping[str, Any]) -> None:
        if images is None:
            return
        if images.shape[1:] != self._shape(raw.get("input_shape")) or images.dtype not in FLOATS:
            self.file.refuse(f"has {what} of shape {tuple(images.shape)} and type {images.dtype}")
        if images.numel() and not (images.min() >= 0 and images.max() <= 1):
            self.file.refuse(f"has {what} beyond 0..1")

    def _expect_classes(self, classes: Tensor | None, what: str, raw: Mapping[str, Any]) -> None:
        if classes is None:
            return
        count = self._count(raw, "num_classes")
        indices = classes.dim() == 1 and classes.dtype == torch.int64
        mixed = classes.dim() == 2 and classes.shape[1] == count and classes.dtype in FLOATS
        if not indices and not mixed:
            self.file.refuse(f"has {what} of shape {tuple(classes.shape)} and type {classes.dtype}")
        if classes.numel() and not (classes.min() >= 0 and classes.max() <= (count - 1 if indices else 1)):
            self.file.refuse(f"has {what} beyond the {count} classes")

    def _plan(self, raw: object) -> LocalPlan:
        if not isinstance(raw, dict):
            self.file.refuse("has no plan")
        types = typing.get_type_hints(LocalPlan)
        for key, value in raw.items():
            if key not in types or not fits(value, types[key]):
                self.file.refuse(f"has {key}={value!r} in its plan")
        if missing := [f.name for f in fields(LocalPlan) if f.name not in {*raw, "mode"}]:
            self.file.refuse(f"has no {missing[0]} in its plan")
        return LocalPlan(**raw)

    def _shape(self, raw: object) -> tuple[int, ...]:
        if not isinstance(raw, list) or not raw or not all(fits(n, int) and n > 0 for n in raw):
            self.file.refuse(f"has the input shape {raw!r}")
        return tuple(raw)

    def _count(self, raw: Mapping[str, Any], key: str) -> int:
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_EXAMPLES:
            self.file.refuse(f"has {key} {value!r}")
        return value

    def _parameters(self, tensors: Tensors) -> Tensors:
        known = dict(self.model.named_parameters(remove_duplicate=False))
        return once_each(self.model, self._fit(tensors, known, "parameter"))

    def _buffers(self, tensors: Tensors) -> Tensors:
        return self._fit(tensors, dict(self.model.named_buffers()), "buffer")

    def _fit(self, tensors: Tensors, known: Tensors, what: str) -> Tensors:
        for name, tensor in tensors.items():
            if name not in known:
                self.file.refuse(f"holds a {what} {name}, which the model given lacks")
            exact = what == "buffer" and not known[name].is_floating_point()
            if tensor.dtype not in ((known[name].dtype,) if exact else FLOATS):
                self.file.refuse(f"holds {name} of type {str(tensor.dtype).removeprefix('torch.')}")
            if tensor.shape != known[name].shape:
                shapes = f"{tuple(tensor.shape)} where the model given has {tuple(known[name].shape)}"
                self.file.refuse(f"holds {name} of shape {shapes}")
        return {name: tensors[name] for name in known if name in tensors}

    def _split(self, digest: str, *prefixes: str) -> tuple[dict[str, Tensor], ...]:
        tensors = self._tensors(digest)
        if stray := [name for name in tensors if not name.startswith(prefixes)]:
            self.file.refuse(f"holds an unknown tensor {stray[0]}")
        return tuple(without_prefix(prefix, tensors) for prefix in prefixes)

    def _tensors(self, digest: str) -> dict[str, Tensor]:
        return self.file.tensors(digest, 16 * sum(t.nbytes for t in self.model.state_dict().values()))
