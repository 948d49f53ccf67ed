"""Safe reading of checkpoints and updates of several frameworks from untrusted files."""

import io
import os
import struct
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from fl_privacy.errors import UserError, reason_of
from fl_privacy.files.foreign import DAMAGED, LARGEST_FILE, open_regular

_MAIN, _DATUMS = 100, (101, 102, 103)
"""Section markers of NVFlare's FOBS files: the message, and large values that it refers to."""

_HEADER = struct.Struct(">BBQ")
_MOST_DEPTH, _MOST_ENTRIES = 32, 1 << 18
_MOST_SPREAD = 200  # largest ratio of unpacked to packed bytes of a zip file of more than 256 MiB

_SCALARS = ("numpy.float32", "numpy.float64", "numpy.int32", "numpy.int64")
_OF_FLARE = {"WEIGHTS": False, "WEIGHT_DIFF": True}
"""Kind of NVFlare's DXO -> ``True`` if its arrays are changes of weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedArrays:
    """Arrays read from a file, weights or changes of weights, and what else the file states."""

    arrays: Mapping[str, Tensor]
    is_change: bool = False  # ``True`` if the arrays are changes of weights instead of weights
    steps: int | None = None  # number of local steps, if stated
    said: tuple[str, ...] = field(default=())  # sentences for pages on what the file states


class _UnfitError(ValueError):
    """Raised with the reason for which a file is refused."""


def read_arrays(path: Path) -> SavedArrays:
    """Read a file of named arrays; its content, not its name, decides on the format.

    Formats are safetensors, ``.npz``, PyTorch checkpoints (``weights_only``), NVFlare's DXO, Fed-BioMed's ``.mpk`` and
    OpenFL's ``.pbuf``. ``UserError`` if the file is missing, too large, damaged, a plain pickle, or of another format.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size, start = os.fstat(file.fileno()).st_size, file.read(_HEADER.size + 1)
            if size > LARGEST_FILE:
                raise _UnfitError(f"has {size >> 20} MiB, more than {LARGEST_FILE >> 20}")
            file.seek(0)
            return _of_stream(file, start, size)
    except OSError as error:
        raise UserError(f"{path} is expected to be a file, but: {error.strerror or error}; name another.") from error
    except (*DAMAGED, SafetensorError) as error:
        why = str(error) if isinstance(error, _UnfitError) else f"is damaged ({reason_of(error)[:160]})"
        raise UserError(
            f"{path} is expected to hold arrays as safetensors, .npz, a PyTorch checkpoint, NVFlare's DXO, Fed-BioMed's"
            f" .mpk or OpenFL's .pbuf, but {why}; save it anew, as by"
            " safetensors.torch.save_file(model.state_dict(), FILE)."
        ) from error


def _of_stream(file: Any, start: bytes, size: int) -> SavedArrays:
    if start[:4] == b"PK\x03\x04":
        return _of_zip(file)
    if len(start) > _HEADER.size and start[0] == _MAIN and start[_HEADER.size] > 0x7F:  # msgpack, not the text of JSON
        return _of_flare(file, size)
    if start[:6] == b"\x93NUMPY":
        raise _UnfitError("is one array without the names of parameters")
    if len(start) > 8 and start[8:9] == b"{":
        if not 2 <= struct.unpack("<Q", start[:8])[0] <= size - 8:
            raise _UnfitError("ends before its header does")
        return SavedArrays(arrays=_dense(load_safetensors(file.read())))
    if start[:1] == b"\n":  # field 1 of OpenFL's message ModelProto
        return _of_openfl(memoryview(file.read()))
    is_packed = bool(start) and (0x80 < start[0] <= 0x9F or 0xDC <= start[0] <= 0xDF)  # msgpack's mapping or list
    if is_packed and start[1:4] not in (b"HDF", b"PNG"):
        held = _unpacked(file.read(), {})
        if isinstance(held, list):
            raise _UnfitError("is a list without names, as Fed-BioMed's nodes send for secure aggregation")
        return SavedArrays(arrays=_dense(_largest(held)))
    if start[:1] == b"\x80":
        raise _UnfitError("is a pickle, which runs code when it is loaded and is never loaded here")
    raise _UnfitError("begins like none of these" if size else "is empty")


def _of_zip(file: Any) -> SavedArrays:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        packed, size = (sum(getattr(one, of) for one in members) for of in ("compress_size", "file_size"))
        if len(members) > _MOST_ENTRIES or size > (most := min(LARGEST_FILE, max(_MOST_SPREAD * packed, 1 << 28))):
            raise _UnfitError(f"unpacks to more than {most >> 20} MiB")
        if not any(member.filename.endswith("data.pkl") for member in members):
            arrays = [member for member in members if member.filename.endswith(".npy")]
            if len(arrays) < len(members) or not arrays:
                raise _UnfitError("is a zip file of something else")
            found = {one.filename.removesuffix(".npy"): _array(archive.read(one)) for one in arrays}
            return SavedArrays(arrays=found)
        if any("/code/" in member.filename for member in members):
            raise _UnfitError("is a TorchScript program, which holds code")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise _UnfitError("is compressed, which PyTorch's files are not")
    file.seek(0)
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        what = str(error).partition("GLOBAL ")[2].partition(" ")[0] or "objects"
        raise _UnfitError(f"holds {what} next to tensors, whose loading would run code") from error
    return SavedArrays(arrays=_dense(_largest(held)))


def _largest(held: object) -> dict[str, Tensor]:
    return max(_mappings(held, set()), key=lambda one: sum(t.numel() for t in one.values()), default={})


def _mappings(held: object, seen: set[int]) -> Iterator[dict[str, Tensor]]:
    if not isinstance(held, Mapping) or id(held) in seen or len(seen) > _MOST_ENTRIES:
        return
    seen.add(id(held))  # a pickle may refer to a mapping many times
    own = {str(name): value for name, value in held.items() if isinstance(value, Tensor)}
    if own and all(isinstance(name, str) for name in held):  # an optimizer's state has numbers
        yield own
    for name, value in held.items():
        if "optim" not in str(name):
            yield from _mappings(value, seen)


def _dense(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not arrays:
        raise _UnfitError("holds no arrays with names")
    for name, value in arrays.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise _UnfitError(f"holds {name}, which is no dense tensor")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise _UnfitError(f"holds {name} of shape {tuple(value.shape)}, which is more than its values")
    return {name: value.detach() for name, value in arrays.items()}


def _array(data: bytes) -> Tensor:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(stream)
    if kind.hasobject:
        raise _UnfitError("holds pickled objects, which run code when they are loaded and are never loaded here")
    if prod(shape) * kind.itemsize != len(data) - stream.tell():
        raise _UnfitError(f"holds an array of shape {shape}, which is not the number of its values")
    stream.seek(0)
    array = np.lib.format.read_array(stream, allow_pickle=False)
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(shape))


def _of_flare(file: Any, length: int) -> SavedArrays:
    # a DXO, alone or in a Shareable, in the format FOBS; NVFlare is not imported
    sections, blobs = list[bytes](), dict[str, bytes]()
    while header := file.read(_HEADER.size):
        marker, _, size = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 0, 0)
        if size > length - file.tell() or marker not in (_MAIN, *_DATUMS):
            raise _UnfitError("ends within a section")
        data = file.read(size)
        if marker == _MAIN:
            sections.append(data)
        else:
            blobs[str(uuid.UUID(bytes=data[:16]))] = data[16:]
    held = _unpacked(sections[0], blobs)
    dxo = held.get("DXO", held) if isinstance(held, Mapping) else {}
    kind, arrays, meta = dxo.get("data_kind", dxo.get("kind")), dxo.get("data"), dxo.get("meta") or {}
    if kind not in _OF_FLARE or not isinstance(arrays, Mapping) or not isinstance(meta, Mapping):
        raise _UnfitError(f"is a DXO of the kind {kind}, not {' or '.join(_OF_FLARE)}")
    steps, history = meta.get("NUM_STEPS_CURRENT_ROUND"), meta.get("filter_history")
    said = [f"NVFlare's DXO of the kind {kind}"]
    said += [f"{steps} local step{'s' * (steps != 1)} stated"] if steps else []
    said += [f"filters that it passed: {', '.join(map(str, history))}"] if isinstance(history, list) and history else []
    found = {str(name): value for name, value in arrays.items() if isinstance(value, Tensor)}
    known = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
    return SavedArrays(
        arrays=_dense(found), is_change=_OF_FLARE[kind], steps=steps if known else None, said=(f"{'; '.join(said)}.",)
    )


def _unpacked(data: bytes, blobs: Mapping[str, bytes]) -> Any:
    import msgpack  # noqa: PLC0415

    limits = {"max_array_len": _MOST_ENTRIES, "max_map_len": _MOST_ENTRIES}
    try:
        return _plain(msgpack.unpackb(data, strict_map_key=False, **limits), blobs, 0)
    except (msgpack.exceptions.UnpackException, RecursionError) as error:
        raise _UnfitError(f"is damaged ({reason_of(error)})") from error


def _plain(value: Any, blobs: Mapping[str, bytes], depth: int) -> Any:
    # arrays become tensors, other objects their contents; blobs: separately stored arrays by id
    if depth > _MOST_DEPTH:
        raise _UnfitError("is nested too deeply")
    if not isinstance(value, dict):
        return [_plain(one, blobs, depth + 1) for one in value] if isinstance(value, list) else value
    kind, held = value.get("__fobs_type__"), value.get("__fobs_data__")
    if "__type__" in value:  # of Fed-BioMed
        of, own = value["__type__"], value["value"]
        is_array = of in ("torch.Tensor", "np.ndarray")
        return _values(own[0], np.dtype(str(own[1])), own[2]) if is_array else _plain(own, blobs, depth + 1)
    if kind is None:
        return {name: _plain(one, blobs, depth + 1) for name, one in value.items()}
    if kind in ("numpy.ndarray", "torch.Tensor"):
        data = _plain(held.get("data"), blobs, depth + 1) if isinstance(held, dict) else held
        if not isinstance(data, bytes):
            raise _UnfitError("refers to arrays that were sent apart from it; write it by DXO.to_file")
        return _array(data) if kind == "numpy.ndarray" else load_safetensors(data)["t"]
    held = _plain(held, blobs, depth + 1)
    if kind == "nvflare.fuel.utils.fobs.datum.DatumRef" or kind in _SCALARS:
        return torch.tensor(held) if kind in _SCALARS else blobs.get(str(held["data"]["datum_id"]))
    if isinstance(held, list) and kind == "nvflare.apis.dxo.DXO":  # as jobs write it, whose decomposers are registered
        held = {"data": dict(zip(("data_kind", "meta", "data"), held, strict=True))}
    return held.get("dict", held.get("data", held)) if isinstance(held, dict) else held


def _values(data: Any, kind: np.dtype[Any], shape: Any) -> Tensor:
    shape = tuple(map(int, shape))
    if kind.kind not in "fiub" or min(shape, default=0) < 0 or prod(shape) * kind.itemsize != len(data):
        raise _UnfitError(f"holds an array of shape {shape} and kind {kind}, which is not the number of its values")
    return torch.from_numpy(np.frombuffer(data, kind).reshape(shape).copy())


def _of_openfl(data: memoryview) -> SavedArrays:
    """Read the uncompressed float32 arrays of OpenFL's ModelProto, without optimizer states."""
    found, tags, rounds = dict[str, Tensor](), set[str](), set[int]()
    for number, message in _fields(data):
        held: dict[int, list[Any]] = {}
        for place, value in _fields(message) if number == 1 else ():
            held.setdefault(place, []).append(value)
        if not held.keys() >= {1, 6}:
            raise _UnfitError("begins like none of these")
        (name,), values = held[1], held.get(7, [b""])
        shapes = [list(_fields(one)) for one in held[6]]
        if len(shapes) != 1 or any(place != 2 for place, _ in shapes[0]):
            raise _UnfitError("was compressed by a pipeline of OpenFL; write it by `fx model save`")
        shape = [one for _, one in shapes[0] if isinstance(one, int)]
        for packed in (one for _, one in shapes[0] if not isinstance(one, int)):
            place = 0
            while place < len(packed):
                size, place = _varint(packed, place)
                shape.append(size)
        tags |= {str(tag, "utf-8") for tag in held.get(5, [])}
        rounds |= set(held.get(2, []))
        if not (title := str(name, "utf-8")).startswith("__opt_"):
            found[title] = _values(values[0], np.dtype("<f4"), shape)
    if len(tags & {"delta", "model"}) > 1:
        raise _UnfitError("holds weights next to changes of weights")
    numbers, named = ", ".join(map(str, sorted(rounds or {0}))), ", ".join(sorted(tags)) or "none"
    said = f"OpenFL's model of round {numbers}, with the tags {named}; an aggregator's is a mean over collaborators."
    return SavedArrays(arrays=_dense(found), is_change="delta" in tags, said=(said,))


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message as (number, integer or bytes)."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind, value, end = key & 7, 0, place + {1: 8, 5: 4}.get(key & 7, len(data) + 1)
        if kind in (0, 2):
            value, end = _varint(data, place)
        if kind == 2:
            place, end = end, end + value
        if end > len(data):
            raise _UnfitError("ends within a field")
        yield key >> 3, value if kind == 0 else data[place:end]
        place = end


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[place + shift // 7] & 0x7F) << shift
        if data[place + shift // 7] < 0x80:
            return value, place + shift // 7 + 1
    raise _UnfitError("is damaged (a number has no end)")
