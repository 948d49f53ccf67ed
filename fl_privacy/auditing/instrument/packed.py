"""Find parameters in other forms than one array each: packed into bytes, joined, or as values and places."""

import base64
import binascii
import bz2
import io
import json
import lzma
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from fl_privacy.auditing.clear_text.copies import array_in
from fl_privacy.files.foreign import DAMAGED, ArrayUnpickler

MOST_BYTES, DEPTH = 1 << 30, 4
"""Largest unpacked size of a client's values in bytes, and largest depth of nested packings that are opened."""

NEAR, SAME, FEW = 1e-2, 1e-5, 8
"""Largest relative distances of an array from its parameter's values: of many values, and of fewer than ``FEW``."""

MOST_TRIES = 50_000  # largest number of tried combinations of values, places and parameters


@dataclass(frozen=True, eq=False)
class Spread:
    """A parameter that was uploaded in another form than one array of its shape.

    ``values``: whole parameter, with zeros, or the values that the server sent, for elements that were not uploaded.
    ``sources``: names of arrays that hold the uploaded values.
    """

    name: str
    values: np.ndarray
    sources: tuple[str, ...]


def unpacked(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays within bytes, texts and lists of a reply, by record/key.

    Bytes may be of NumPy, PyTorch, safetensors or pickle, and compressed; no code in them is executed.
    """
    found: dict[str, np.ndarray] = {}
    for where, value in values.items():
        parts = value if isinstance(value, list) and value and isinstance(value[0], bytes | str) else [value]
        for number, part in enumerate(parts):
            place = where if len(parts) == 1 else f"{where}[{number}]"
            for name, array in _of_value(part):
                found[f"{place}:{name}" if name else place] = array
    return found


def _of_value(value: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, str) and len(value) >= 64:
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            return
    if isinstance(value, bytes) and len(value) >= 16:
        yield from _of_bytes(value, 0)
    elif isinstance(value, list) and value and type(value[0]) in (int, float):
        yield "", np.asarray(value)


def _of_bytes(content: bytes, depth: int) -> Iterator[tuple[str, np.ndarray]]:
    if depth > DEPTH:
        return
    for opened in (_archived, _serialized):
        with suppress(*DAMAGED, SafetensorError):
            if (made := opened(content)) is not None:
                yield from list(_leaves(made))
                return
    if (array := array_in(content)) is not None:
        yield "", array
    elif (inner := _inflated(content)) is not None:
        yield from _of_bytes(inner, depth + 1)
    else:
        yield from _plain(content)


def _archived(content: bytes) -> Any:
    if not content.startswith(b"PK\x03\x04"):
        return None
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > MOST_BYTES:
            return None
        if any(entry.filename.endswith("data.pkl") for entry in entries):
            return _stored(content)
        inner = {entry.filename.removesuffix(".npy"): archive.read(entry) for entry in entries if entry.file_size}
    return {name: dict(_of_bytes(part, 1)) for name, part in inner.items()}


class _Unpickler(ArrayUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = {
            ("collections", "OrderedDict"): dict,
            ("_codecs", "encode"): str.encode,
            ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch.storage", "_load_from_bytes"): _stored,
        }
        return plain[module, name] if (module, name) in plain else super().find_class(module, name)


def _stored(content: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _serialized(content: bytes) -> Any:
    if content.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return _stored(content) if content[:13] == _OLD_TORCH else _Unpickler(io.BytesIO(content)).load()
    size = int.from_bytes(content[:8], "little")
    if not 2 <= size <= len(content) - 8 or content[8:9] != b"{":
        return None
    from safetensors.torch import load  # noqa: PLC0415  (rarely sent)

    json.loads(content[8 : 8 + size])
    return load(content)


_OLD_TORCH = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)[:13]
"""First bytes of a ``torch.save`` file before PyTorch 1.6."""


def _inflated(content: bytes) -> bytes | None:
    with suppress(zlib.error, OSError, lzma.LZMAError, EOFError):
        if content[:2] == b"\x1f\x8b" or (content[0] & 0x0F == 8 and int.from_bytes(content[:2], "big") % 31 == 0):
            return zlib.decompressobj(wbits=47).decompress(content, MOST_BYTES)  # gzip or zlib, by its header
        if content[:3] == b"BZh":
            return bz2.BZ2Decompressor().decompress(content, MOST_BYTES)
        if content[:6] == b"\xfd7zXZ\x00":
            return lzma.LZMADecompressor().decompress(content, MOST_BYTES)
    return None


def _plain(content: bytes) -> Iterator[tuple[str, np.ndarray]]:
    for kind in ("<f4", "<f8", "<f2"):
        if len(content) % int(kind[-1]) == 0:
            numbers = np.frombuffer(content, kind)
            with np.errstate(all="ignore"):
                size = float(np.abs(numbers.astype(np.float64)).mean())
            if 1e-12 < size < 1e6:
                yield kind[1:], numbers


def _leaves(made: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(made, Tensor):
        made = (made.float() if made.dtype == torch.bfloat16 else made).detach().cpu().numpy()
    if isinstance(made, np.ndarray):
        yield name, made
    elif depth <= DEPTH and isinstance(made, list) and made and all(type(one) in (int, float) for one in made):
        yield name, np.asarray(made)
    elif depth <= DEPTH and isinstance(made, Mapping | list | tuple):
        for key, value in made.items() if isinstance(made, Mapping) else enumerate(made):
            yield from _leaves(value, ".".join(filter(None, (name, str(key)))), depth + 1)
    elif depth <= DEPTH and isinstance(made, bytes):
        yield from ((".".join(filter(None, (name, own))), array) for own, array in _of_bytes(made, depth + 1))


def spread(
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, np.ndarray],
    trained: Collection[str],
    base: Mapping[str, np.ndarray] | None,
) -> list[Spread]:
    """Find parameters that were sent sparsely (values with indices or a mask), or joined to one array.

    Indices are positions in one parameter, or in all parameters joined. ``arrays``: arrays of the reply, except those
    that hold one whole parameter. ``values``: parameter -> values after the observed training. ``trained``: names of
    trained parameters; a joined array may omit the others. ``base``: parameter -> values of elements that were not
    uploaded; ``None`` for zero.
    """
    left = {name: value for name, value in values.items() if value.dtype.kind == "f" and value.size}
    halves: dict[str, np.ndarray] = {}  # places and values side by side in one array
    for key, array in arrays.items():
        if array.dtype.kind == "f" and array.ndim == 2 and 2 in array.shape:
            pair = array if array.shape[0] == 2 else array.T
            halves |= {f"{key}[{k}]": half for k, half in enumerate(pair)} if any(map(_says_places, pair)) else {}
    arrays = {**arrays, **halves}
    search = _Search({key: array for key, array in arrays.items() if _says_places(array)}, list(arrays), left)
    found: list[Spread] = []
    for key in [key for key, array in arrays.items() if array.dtype.kind == "f" and array.size]:
        shape, size = arrays[key].shape, arrays[key].size
        whole = {name for name, value in left.items() if value.size == size and value.shape != shape}
        orders = list(_orders(left, trained))
        joined = any(sum(left[name].size for name in order) == size for order in orders)
        if key in search.used or not (search.places or whole or joined):
            continue
        own = arrays[key].astype(np.float64).reshape(-1)
        if not np.isfinite(own).all() or not own.any():
            continue
        placed = search.find(key, own, [*([name] for name in left), *orders], whole)
        if placed is not None:
            sources = tuple(dict.fromkeys(one[:-3] if one in halves else one for one in placed.sources))
            found += replace(placed, sources=sources).parts(left, base)
            search.used |= set(placed.sources)
            for name in placed.target:
                del left[name]
    return found


def _says_places(array: np.ndarray) -> bool:
    if array.dtype.kind == "f":
        return bool(array.size and np.isfinite(array).all() and (array == np.floor(array)).all() and array.min() >= 0)
    return array.dtype.kind in "biu" and array.size > 0 and bool(array.min() >= 0)


def _orders(values: Mapping[str, np.ndarray], trained: Collection[str]) -> Iterator[list[str]]:
    names = list(values)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    orders = (names, [name for group in groups.values() for name in group], [name for name in names if name in trained])
    yield from (list(order) for order in dict.fromkeys(map(tuple, orders)) if len(order) > 1)


@dataclass(frozen=True, eq=False)
class _Placed:
    """Uploaded values ``numbers`` (K,) and their indices ``places`` (K,) in the concatenated parameters ``target``."""

    target: Sequence[str]
    places: np.ndarray
    numbers: np.ndarray
    sources: tuple[str, ...]

    def parts(self, values: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None) -> Iterator[Spread]:
        start = 0
        for name in self.target:
            shape, size = values[name].shape, values[name].size
            whole = np.zeros(size) if base is None else base[name].astype(np.float64).reshape(-1).copy()
            here = (self.places >= start) & (self.places < start + size)
            whole[self.places[here] - start] = self.numbers[here]
            yield Spread(name, whole.reshape(shape).astype(np.float32), self.sources)
            start += size


@dataclass(eq=False)
class _Search:
    places: Mapping[str, np.ndarray]
    order: Sequence[str]
    values: Mapping[str, np.ndarray]
    used: set[str] = field(default_factory=set)
    tries: int = 0

    def find(
        self, key: str, numbers: np.ndarray, targets: Sequence[Sequence[str]], whole: Collection[str]
    ) -> _Placed | None:
        """Find the parameters whose values the uploaded array ``key`` holds; return the first match, or ``None``.

        ``numbers``: values in that array; another array may hold their indices. ``targets``: lists of parameters to
        try, each list joined. ``whole``: parameters that may be sent without indices.
        """
        at = {other: place for place, other in enumerate(self.order)}
        free = (other for other in self.places if other != key and other not in self.used)
        mates = sorted(free, key=lambda other: abs(at[other] - at[key]))
        for target in targets:
            size = sum(self.values[name].size for name in target)
            if len(numbers) > size:
                continue
            all_there = len(numbers) == size and (len(target) > 1 or target[0] in whole)
            if all_there and (sign := self._sign(numbers, target, slice(None))):
                return _Placed(target, np.arange(size), sign * numbers, (key,))
            shape = self.values[target[0]].shape if len(target) == 1 else ()
            for mate in mates:
                places = _places(self.places[mate], len(numbers), size, shape)
                if places is not None and (sign := self._sign(numbers, target, places)):
                    return _Placed(target, places, sign * numbers, (key, mate))
        return None

    def _sign(self, numbers: np.ndarray, target: Sequence[str], places: np.ndarray | slice) -> int:
        self.tries += 1
        if self.tries > MOST_TRIES:
            return 0
        own = np.concatenate([self.values[name].reshape(-1) for name in target]).astype(np.float64)[places]
        limit = (NEAR if len(numbers) >= FEW else SAME) * float(np.linalg.norm(numbers))
        return next((sign for sign in (1, -1) if np.linalg.norm(sign * numbers - own) <= limit), 0)


def _places(array: np.ndarray, number: int, size: int, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the flat indices (number,) that ``array`` holds, as numbers or as a mask; ``None`` if it holds neither.

    ``size``, ``shape``: of the indexed parameter. An index may be flat, or have a number for each axis.
    """
    if array.size == size > number and array.dtype.itemsize == 1:
        chosen = np.flatnonzero(array.reshape(-1))
        return chosen if len(chosen) == number else None
    if array.size == number:
        flat = array.astype(np.int64).reshape(-1)
    elif len(shape) > 1 and array.size == number * len(shape):
        whole = array.astype(np.int64)
        axes = whole.reshape(len(shape), -1) if whole.shape[0] == len(shape) else whole.reshape(-1, len(shape)).T
        if any((axis >= most).any() for axis, most in zip(axes, shape, strict=True)):
            return None
        flat = np.asarray(np.ravel_multi_index(tuple(axes), shape))
    else:
        return None
    return flat if flat.min() >= 0 and flat.max() < size and len(np.unique(flat)) == number else None
