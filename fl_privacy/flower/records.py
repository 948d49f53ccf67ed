"""Convert tensors to Flower records and back without loss, and find the model in a message."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import nn

from fl_privacy import checks
from fl_privacy.defenses import ClientState
from fl_privacy.defenses.encoding import decode, encode, plainly_shortest
from fl_privacy.errors import UserError
from fl_privacy.federation import LocalResult
from fl_privacy.models.unwrap_model import first_names, once_each
from fl_privacy.types import ModelState, Tensors, Upload

NUMPY = "numpy.ndarray"  # Flower's serialization type for NumPy's own format


def plain_array(values: np.ndarray) -> Array:
    """Return the same array as ``Array.from_numpy_ndarray(values)``, but faster."""
    values = np.asarray(values, order="C")
    if values.dtype.hasobject or values.dtype.names is not None:
        return Array.from_numpy_ndarray(values)
    dtype, shape = str(values.dtype), tuple(values.shape)
    return Array(dtype=dtype, shape=shape, stype=NUMPY, data=_header(dtype, shape) + values.tobytes())


def array_values(array: Array) -> np.ndarray:
    """Return the values of ``array``: a read-only view if :func:`plain_array` wrote its bytes, else a copy."""
    dtype, shape = array.dtype, tuple(array.shape)
    if array.stype == NUMPY and dtype in _PLAIN:
        header = _header(dtype, shape)
        if len(array.data) == len(header) + _PLAIN[dtype] * math.prod(shape) and array.data.startswith(header):
            return np.frombuffer(array.data, dtype=dtype, offset=len(header)).reshape(shape)
    return array.numpy()


_KINDS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
_PLAIN = {str(dtype): dtype.itemsize for dtype in map(np.dtype, _KINDS)}  # bytes of an element by dtype name


@lru_cache(maxsize=4096)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


PARAMETERS = "parameters"
BUFFERS = "buffers"  # names of the two records in which clients of this package and their server send models
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # last names of batch norm's buffers
FLOATING = ("float16", "float32", "float64")  # dtypes in which floating-point values may be sent


def arrays_of_model(content: RecordDict, like: Tensors, *, whole: bool = False) -> dict[str, Array]:
    """Return the arrays of the model in a message, by the model's names.

    The message holds one record of arrays that is not empty, or ``parameters`` and ``buffers`` without a common name.
    All arrays must fit the model by name, shape and kind of numbers; "0", "1", ... stand for the model's names in
    order. ``UserError`` for anything else, such as a second record or an unknown name, which some clients would skip
    and others train on. ``like``: values of the model by name, in the order of its ``state_dict()``. ``whole``:
    ``True`` requires the whole model in this order; only batch norm, its statistics or its counters may be missing.
    """
    placed = placed_arrays(content)
    keys = [key for _, key in placed]
    names = list(like) if keys == [str(i) for i in range(len(like))] else keys
    places = dict(zip(names, placed, strict=True))
    arrays = {name: placed[place] for name, place in places.items()}
    for name, array in arrays.items():
        _expect_fits(name, array, like)
    if whole:
        _expect_whole(list(places), like)
        for record in content.array_records:
            names = [name for name, (place, _) in places.items() if place == record]
            ordered = [name for name in like if name in names]
            if moved := [got for got, wanted in zip(names, ordered, strict=True) if got != wanted]:
                raise UserError(
                    f"The model is expected in the order of its state_dict(), but {moved[0]} is in another position;"
                    " send it in that order, by which some clients go."
                )
    return arrays


def placed_arrays(content: RecordDict) -> dict[tuple[str, str], Array]:
    """Return a message's arrays by (record, key).

    ``UserError`` unless they are in one record, or in ``parameters`` and ``buffers`` without a common key.
    """
    records = {place: record for place, record in content.array_records.items() if record}
    ours = records.keys() <= {PARAMETERS, BUFFERS}
    if len(records) > 1 and not (ours and records[PARAMETERS].keys().isdisjoint(records[BUFFERS])):
        raise UserError(
            f"A message is expected to hold the model in one record of arrays, but has {len(records)}:"
            f" {', '.join(map(repr, sorted(records)[:4]))}; put the model into one, and nothing else in arrays."
        )
    return {(place, key): array for place, record in records.items() for key, array in record.items()}


def _expect_fits(name: str, array: Array, like: Tensors) -> None:
    if name not in like:
        raise UserError(f"Arrays of a message are expected to be the model's, but {name!r} is not; take it out.")
    known = like[name]
    if tuple(array.shape) != tuple(known.shape):
        raise UserError(
            f"{name} is expected to have the shape {tuple(known.shape)}, but has {tuple(array.shape)};"
            " use the architecture agreed on."
        )
    try:
        fits = array.dtype in FLOATING if known.is_floating_point() else np.dtype(array.dtype).kind in "fiub"
    except TypeError:
        fits = False
    if not fits:  # strategies turn counters into fractions: these may come as either
        raise UserError(
            f"{name} is expected to be of {str(known.dtype).removeprefix('torch.')} as in the model, but is of"
            f" {array.dtype}; convert it."
        )


def _expect_whole(names: Sequence[str], like: Tensors) -> None:
    missing = {name for name in like if name not in names}
    ends = {name: name.rpartition(".")[2] for name in like}
    normalizing = {name.rpartition(".")[0] for name, end in ends.items() if end in STATISTICS}
    kept_by_some = (
        {name for name, end in ends.items() if end == STATISTICS[-1]},
        {name for name, end in ends.items() if end in STATISTICS},
        {name for name in like if name.rpartition(".")[0] in normalizing},
    )
    if missing and missing not in kept_by_some:
        gone = next(name for name in like if name in missing)
        raise UserError(f"The whole model is expected in a message, but {gone} is missing; send all of it.")


def expect_listed(names: Sequence[str], listed: Sequence[str]) -> None:
    """Raise ``UserError`` unless a message's array ``names`` are those ``listed``, in this order.

    A batch norm statistic that is not listed is allowed only right after its layer's parameters, since clients that
    match arrays by position must not train a parameter under a statistic's name.
    """
    if list(names) == list(listed):
        return
    known = set(listed)
    if [name for name in names if name in known] != list(listed):
        raise UserError(
            f"The arrays {', '.join(listed[:3])}... are expected in this order, but a message has"
            f" {', '.join(names[:4])}...; give model=, or the names of this app in their order."
        )
    before = ""
    for name in names:
        layer, _, end = name.rpartition(".")
        if name not in known and not (end in STATISTICS and before.rpartition(".")[0] == layer and before):
            raise UserError(
                f"{name} is expected to be one of the names given, or a statistic behind the parameters of its layer,"
                " but is not; give model=, or the names of all arrays in their order."
            )
        before = name


CONFIG = "config"
METRICS = "metrics"
CLIENT = "client"  # names of a message's records other than arrays; ``client`` holds the partition that replied
CLIENT_RAISED = 2  # Flower's error code for an exception in a client
UNFIT = 1002  # this package's error code for a message refused for its own content, whatever the client's examples are
ROUND = "server-round"
PARTITION = "partition-id"
PARTITIONS = "num-partitions"
SIMULATED = "simulated"
DATA_PATH = "data-path"
OWN_DATA = "own-data"
NUM_EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
LOSS_WITHHELD = "train-loss-withheld"
SECONDS = "seconds"
DEFENSE_SECONDS = "defense-seconds"
VICTIM = "victim"
BATCH_SIZE = "batch-size"
TEST = "test"  # keys within them, as Flower spells its own


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Convert ``tensor`` to NumPy, with its shape and dtype; ``UserError`` if NumPy has no such dtype."""
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as error:
        raise UserError(
            f"Flower carries NumPy's dtypes, but got a tensor of {tensor.dtype}; convert it to float32."
        ) from error


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Copy an array to memory allocated by PyTorch, since alignment affects the last bits of some products."""
    tensor = torch.empty(array.shape, dtype=_dtype_like(array.dtype))
    tensor.numpy()[...] = array
    return tensor


@lru_cache(maxsize=32)
def _dtype_like(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype


def kinds_of_arrays(content: RecordDict, names: Collection[str]) -> dict[str, torch.dtype] | None:
    """Return dtypes of the arrays by ``names``, in order; ``None`` if there are more or fewer arrays than names."""
    kinds = [_dtype_like(np.dtype(a.dtype)) for record in content.array_records.values() for a in record.values()]
    return dict(zip(names, kinds, strict=True)) if len(kinds) == len(names) else None


def to_record(tensors: Tensors) -> ArrayRecord:
    """Convert tensors by name into a record."""
    return ArrayRecord({name: plain_array(to_array(t)) for name, t in tensors.items()})


def to_tensors(record: Mapping[str, Array], like: Tensors | None = None) -> dict[str, torch.Tensor]:
    """Convert a record into tensors by name; ``like``: expected tensors, to decode arrays of :func:`shortest`."""
    expected = like or {}
    return {n: expand(n, a, expected) if a.stype == STYPE else to_tensor(array_values(a)) for n, a in record.items()}


def state_records(state: ModelState) -> dict[str, ArrayRecord]:
    """Return the records ``parameters`` and ``buffers`` with the values of ``state``, by name."""
    return {PARAMETERS: to_record(state.parameters), BUFFERS: to_record(state.buffers)}


def all_arrays(content: RecordDict) -> dict[str, Array]:
    """Return a message's arrays by key; for accepted forms and ``UserError`` see :func:`placed_arrays`."""
    return {key: array for (_, key), array in placed_arrays(content).items()}


def model_values(content: RecordDict, like: Tensors, *, whole: bool = False) -> dict[str, torch.Tensor]:
    """Return the values of the model in a message, by name; arguments and ``UserError``: see ``arrays_of_model``.

    ``UserError`` also if two names of a shared weight differ in value.
    """
    arrays = arrays_of_model(content, like, whole=whole)
    values = to_tensors(arrays, like)
    for name, array in arrays.items():
        value = values[name]
        if value.shape != tuple(array.shape) or str(value.dtype).removeprefix("torch.") != array.dtype:
            stated = f"{array.dtype} of shape {tuple(array.shape)}"
            raise UserError(f"{name} is expected to be the {stated} it claims, but its bytes are not; send all of it.")
    first: dict[int, str] = {}
    for name, value in values.items() if whole else ():
        own = first.setdefault(id(like[name]), name)
        if not torch.equal(value, values[own]):
            raise UserError(f"{name} is expected to equal {own}, to which it is tied, but differs; send equal values.")
    return values


def model_tensors(model: nn.Module) -> Tensors:
    """Return the parameters and buffers of ``model``'s ``state_dict()``, by name and in its order; not copies."""
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return {name: held[name] for name in model.state_dict() if name in held}


def named(arrays: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Rename arrays that came as a list "0", "1", ... to ``names`` if there are as many; else return them unchanged."""
    unnamed = [str(i) for i in range(len(names))]
    return dict(zip(names, arrays.values(), strict=True)) if list(arrays) == unnamed else dict(arrays)


def read_state(content: RecordDict, model: nn.Module, *, whole: bool = False) -> ModelState:
    """Return the values in a message as ``model``'s parameters and buffers, in whichever accepted form they were sent.

    A shared weight is returned once, under its first name. ``whole`` and ``UserError``: see ``arrays_of_model``.
    """
    like = model_tensors(model)
    first, buffers = first_names(model), dict(model.named_buffers(remove_duplicate=False))
    values = model_values(content, like, whole=whole)
    others = {n: t for n, t in values.items() if n not in first}
    for name, value in others.items():
        if value.is_floating_point() and not buffers[name].is_floating_point():  # strategies average counters too
            others[name] = value.round().to(buffers[name].dtype)
    return ModelState(once_each(model, {n: t for n, t in values.items() if n in first}), others)


def read_upload(content: RecordDict, model: nn.Module, weighted_by: str = NUM_EXAMPLES) -> Upload:
    """Return the upload in a reply of any layout; ``UserError`` if the reply does not state its number of examples.

    ``weighted_by``: metric with the number of examples if the reply has no ``num-examples``.
    """
    values = read_state(content, model)
    for key in dict.fromkeys((NUM_EXAMPLES, weighted_by)):
        for record in content.metric_records.values():
            if isinstance(number := record.get(key), int | float) and math.isfinite(number):
                return Upload(tensors=values.parameters, buffers=values.buffers, num_examples=int(number))
    raise UserError(f"A reply is expected to hold a finite {NUM_EXAMPLES}, but has none; let the client report it.")


def rounded(value: object) -> Any:
    """Round a number, or a list of them, to three digits, since exact figures reveal single examples."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return value
    return (float if isinstance(value, float | np.floating) else int)(float(f"{value:.3g}"))


def finite_number(metrics: MetricRecord, key: str) -> float:
    """Return the metric ``key``; ``UserError`` if it is missing or not finite, or if it is a time and negative."""
    value: Any = metrics.get(key)
    least = 0 if key.endswith(SECONDS) else None
    return float(checks.number(f"the metric {key}", value, at_least=least, example=1.0))


def read_result(content: RecordDict, sent: ModelState) -> LocalResult:
    """Return a ``PrivacyClient``'s result; ``KeyError`` without a record, ``UserError`` for wrong arrays or metrics."""
    arrays = content.array_records
    if more := sorted(arrays.keys() - {PARAMETERS, BUFFERS}):
        raise UserError(f"Arrays are expected in {PARAMETERS} and {BUFFERS} alone, but got {more[0]}; take it out.")
    metrics = content.metric_records[METRICS]
    number = partial(finite_number, metrics)
    withheld = metrics.get(LOSS_WITHHELD) == 1
    timeless = withheld and SECONDS not in metrics and DEFENSE_SECONDS not in metrics
    tensors, buffers = to_tensors(arrays[PARAMETERS], sent.parameters), to_tensors(arrays[BUFFERS])
    return LocalResult(
        upload=Upload(tensors=tensors, buffers=buffers, num_examples=int(number(NUM_EXAMPLES))),
        train_loss=math.nan if withheld else number(TRAIN_LOSS),
        seconds=math.nan if timeless else number(SECONDS),
        defense_seconds=math.nan if timeless else number(DEFENSE_SECONDS),
        bytes_up=sum(  # without NumPy's header, as ``federation.server.upload_bytes`` counts
            len(a.data) if a.stype == STYPE else math.prod(a.shape) * np.dtype(a.dtype).itemsize
            for record in arrays.values()
            for a in record.values()
        ),
    )


STYPE = "fl_privacy.encoded"  # serialization type of arrays that ``defenses.encoding`` encoded


def shortest(array: np.ndarray) -> Array:
    """Encode ``array`` without loss if this saves bytes (many zeros, few distinct values), else as Flower does."""
    plain = plain_array(array)
    if not np.issubdtype(array.dtype, np.floating) or plainly_shortest(array):
        return plain
    data = encode({"": torch.from_numpy(np.array(array))})[""].numpy().tobytes()
    if len(data) >= array.nbytes:
        return plain
    return Array(dtype=plain.dtype, shape=tuple(plain.shape), stype=STYPE, data=data)


def expand(name: str, array: Array, like: Tensors) -> torch.Tensor:
    """Decode a tensor from the compact form of :func:`shortest`.

    ``name``: name of the parameter. ``like``: the model's parameters, whose sizes bound the tensor, since few bytes can
    claim many values. ``UserError`` for an unknown ``name``, wrong bytes, or too many values.
    """
    if name not in like:
        raise UserError(f"An encoded array is expected to be a parameter of the model, but is {name!r}; take it out.")
    if math.prod(array.shape) > like[name].numel():
        raise UserError(
            f"{name} is expected to have the shape {tuple(like[name].shape)}, but has {tuple(array.shape)}; send that."
        )
    claimed = torch.empty(tuple(array.shape), dtype=_dtype_like(np.dtype(array.dtype)), device="meta")
    return decode({name: torch.from_numpy(np.frombuffer(array.data, dtype=np.uint8).copy())}, {name: claimed})[name]


MEMORY = "fl-privacy"


def load_state(memory: RecordDict, device: torch.device | str = "cpu") -> ClientState:
    """Return the state kept by ``save_state``, on ``device``; empty before the first round."""
    if MEMORY not in memory:
        return ClientState()
    return ClientState({name: t.to(device) for name, t in to_tensors(memory.array_records[MEMORY]).items()})


def save_state(memory: RecordDict, state: ClientState) -> None:
    """Keep ``state`` for the next round."""
    memory[MEMORY] = to_record(state.tensors)


MOST_PROBED = 1 << 16


def images_of_probe(probe: Any, size: Any) -> list[str]:
    """Return stand-in names of the images in a probed batch, by which uploads are counted; ``UserError`` if invalid."""
    checks.whole("The number of a probe", probe, at_least=0, example=0)
    checks.whole("The size of a probe", size, at_least=1, at_most=MOST_PROBED, example=8)
    return [f"probed-image-{image}" for image in range(probe * size, (probe + 1) * size)]
