"""Tensors as Flower records and back, without loss; adds no mathematics."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import nn

from fl_privacy.defenses import ClientState
from fl_privacy.defenses.compression.encoding import decode, encode, plainly_shortest
from fl_privacy.errors import UserError
from fl_privacy.federation import LocalResult
from fl_privacy.flower.arrays import array_values, plain_array
from fl_privacy.flower.one_record import BUFFERS, PARAMETERS, placed_arrays, places_of_model
from fl_privacy.tied_weights import first_names, once_each
from fl_privacy.types import ModelState, Tensors, Upload

CONFIG = "config"
METRICS = "metrics"
CLIENT = "client"
"""Names of the records of a message beside the arrays; ``client`` says which partition replied."""

CLIENT_RAISED = 2
"""Flower's code of an error that a client raised."""

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
TEST = "test"
"""Keys within them, as Flower spells its own."""


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """The values of ``tensor``; names, shape and dtype survive the way there and back.

    Raises:
        UserError: NumPy has no such dtype.
    """
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as error:
        raise UserError(
            f"Flower carries NumPy's dtypes, but got a tensor of {tensor.dtype}; convert it to float32."
        ) from error


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """A copy in PyTorch's own memory, whose alignment decides the last bits of some products."""
    tensor = torch.empty(array.shape, dtype=_dtype_like(array.dtype))
    tensor.numpy()[...] = array
    return tensor


@lru_cache(maxsize=32)
def _dtype_like(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype


def to_record(tensors: Tensors) -> ArrayRecord:
    """Tensors by name."""
    return ArrayRecord({name: plain_array(to_array(t)) for name, t in tensors.items()})


def to_tensors(record: Mapping[str, Array], like: Tensors | None = None) -> dict[str, torch.Tensor]:
    """Inverse of ``to_record``; arrays that a client encoded need the tensors expected, ``like``."""
    return {
        name: expand(name, array, like or {}) if array.stype == STYPE else to_tensor(array_values(array))
        for name, array in record.items()
    }


def state_records(state: ModelState) -> dict[str, ArrayRecord]:
    """Parameters and buffers, each in a record of its own."""
    return {PARAMETERS: to_record(state.parameters), BUFFERS: to_record(state.buffers)}


def all_arrays(content: RecordDict) -> dict[str, Array]:
    """The arrays of a message by name: of its one record, or of ours, ``parameters`` and ``buffers``.

    Raises:
        UserError: there are other records of arrays beside it, of which nobody can say which one is the model.
    """
    return {key: array for (_, key), array in placed_arrays(content).items()}


def model_values(content: RecordDict, like: Tensors, *, whole: bool = False) -> dict[str, torch.Tensor]:
    """The values of the model in a message, by name, where ``places_of_model`` finds them.

    Raises:
        UserError: as it does; or, of the ``whole`` model, values are not finite, or one of a tied weight's names has
            others than the first.
    """
    found = places_of_model(content, like, whole=whole)
    arrays = {name: content.array_records[place][key] for name, (place, key) in found.items()}
    values = to_tensors(arrays, like)
    if other := [n for n, a in arrays.items() if values[n].shape != tuple(a.shape) or _named(values[n]) != a.dtype]:
        raise UserError(f"{other[0]} is expected to be of the shape and numbers it claims, but its bytes are not.")
    first: dict[int, str] = {}
    for name, value in values.items() if whole else ():
        if not torch.isfinite(value).all():
            raise UserError(f"The values of {name} are expected to be finite, but some are not; the model is refused.")
        own = first.setdefault(id(like[name]), name)
        if not torch.equal(value, values[own]):
            raise UserError(f"{name} is tied to {own} and expected to be sent with its values, but has others.")
    return values


def _named(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def model_tensors(model: nn.Module) -> Tensors:
    """What a message about ``model`` may hold, by name, in the order of ``state_dict()``; values are not copied."""
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return {name: held[name] for name in model.state_dict() if name in held}


def named(arrays: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """``arrays`` under ``names`` where they came as an unnamed list ("0", "1", ...) of that length."""
    unnamed = [str(i) for i in range(len(names))]
    return dict(zip(names, arrays.values(), strict=True)) if list(arrays) == unnamed else dict(arrays)


def read_state(content: RecordDict, model: nn.Module, *, whole: bool = False) -> ModelState:
    """The values in a message of any layout, told into parameters and buffers as ``model`` has them.

    A weight that is tied has one value, under its first name.

    Raises:
        UserError: the message does not hold this model, see ``places_of_model``.
    """
    like = model_tensors(model)
    first, buffers = first_names(model), dict(model.named_buffers(remove_duplicate=False))
    values = model_values(content, like, whole=whole)
    return ModelState(
        once_each(model, {n: t for n, t in values.items() if n in first}),
        {n: _counted(t, buffers[n]) for n, t in values.items() if n not in first},
    )


def _counted(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``buffer`` as whole numbers where the model has them: strategies of others make fractions of counters."""
    counts = buffer.is_floating_point() and not like.is_floating_point()
    return buffer.round().to(like.dtype) if counts else buffer


def read_upload(content: RecordDict, model: nn.Module, weighted_by: str = NUM_EXAMPLES) -> Upload:
    """The upload in a reply of any layout.

    Args:
        content: of the reply.
        model: of the clients.
        weighted_by: the metric by which the strategy weighs replies, where they have no other number of examples.

    Raises:
        UserError: the reply does not say how many examples it is of.
    """
    values = read_state(content, model)
    for key in dict.fromkeys((NUM_EXAMPLES, weighted_by)):
        for record in content.metric_records.values():
            if isinstance(number := record.get(key), int | float) and math.isfinite(number):
                return Upload(tensors=values.parameters, buffers=values.buffers, num_examples=int(number))
    raise UserError(f"A reply is expected to hold a metric {NUM_EXAMPLES}, but has none; let the client report it.")


def finite_number(metrics: MetricRecord, key: str) -> float:
    """The metric ``key``.

    Raises:
        UserError: it is missing, no number, not finite, or seconds below zero.
    """
    value = metrics.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value) or (value < 0 and key.endswith(SECONDS)):
        raise UserError(f"the metric {key} is expected to be a finite number, got {value!r}")
    return float(value)


def read_result(content: RecordDict, sent: ModelState) -> LocalResult:
    """The reply of a ``PrivacyClient`` to ``sent``.

    Raises:
        KeyError: a record is missing.
        UserError: there are other arrays, or a metric makes no sense.
    """
    arrays = content.array_records
    if more := sorted(arrays.keys() - {PARAMETERS, BUFFERS}):
        raise UserError(f"arrays are expected in {PARAMETERS} and {BUFFERS}, got others in {more[0]}")
    metrics = content.metric_records[METRICS]

    def number(key: str) -> float:
        return finite_number(metrics, key)

    return LocalResult(
        upload=Upload(
            tensors=to_tensors(arrays[PARAMETERS], sent.parameters),
            buffers=to_tensors(arrays[BUFFERS]),
            num_examples=int(number(NUM_EXAMPLES)),
        ),
        train_loss=math.nan if metrics.get(LOSS_WITHHELD) == 1 else number(TRAIN_LOSS),
        seconds=number(SECONDS),
        defense_seconds=number(DEFENSE_SECONDS),
        bytes_up=sum(_bytes_of(array) for record in arrays.values() for array in record.values()),
    )


def _bytes_of(array: Array) -> int:
    """On the wire, as ``federation.server.upload_bytes`` counts them: without the header of NumPy's format."""
    return len(array.data) if array.stype == STYPE else math.prod(array.shape) * np.dtype(array.dtype).itemsize


STYPE = "fl_privacy.encoded"
"""Serialization type of arrays that ``defenses.encoding`` encoded."""


def shortest(array: np.ndarray) -> Array:
    """``array`` encoded without loss if that is shorter (zeros, few levels), else as Flower serializes it."""
    plain = plain_array(array)
    if not np.issubdtype(array.dtype, np.floating) or plainly_shortest(array):
        return plain
    data = encode({"": torch.from_numpy(np.array(array))})[""].numpy().tobytes()
    if len(data) >= array.nbytes:
        return plain
    return Array(dtype=plain.dtype, shape=tuple(plain.shape), stype=STYPE, data=data)


def expand(name: str, array: Array, like: Tensors) -> torch.Tensor:
    """The tensor in an array of the type ``STYPE``, in the shape it claims.

    Args:
        name: of the parameter.
        array: of ``shortest``.
        like: the tensors expected, by name: few bytes may claim many zeros, so that none larger is made.

    Raises:
        UserError: the name is not expected, the tensor larger than expected, or the bytes are not of such a tensor.
    """
    if name not in like:
        raise UserError(f"An encoded array is expected to be a parameter of the model, but is {name!r}.")
    if math.prod(array.shape) > like[name].numel():
        raise UserError(
            f"{name} is expected to have the shape {tuple(like[name].shape)}, but has {tuple(array.shape)}."
        )
    claimed = torch.empty(tuple(array.shape), dtype=_dtype_like(np.dtype(array.dtype)), device="meta")
    return decode({name: torch.from_numpy(np.frombuffer(array.data, dtype=np.uint8).copy())}, {name: claimed})[name]


MEMORY = "fl-privacy"
"""Name of the record in ``context.state``."""


def load_state(memory: RecordDict, device: torch.device | str = "cpu") -> ClientState:
    """What ``save_state`` kept, on ``device``; empty before the first round."""
    if MEMORY not in memory:
        return ClientState()
    return ClientState({name: t.to(device) for name, t in to_tensors(memory.array_records[MEMORY]).items()})


def save_state(memory: RecordDict, state: ClientState) -> None:
    """Keep ``state`` for the next round."""
    memory[MEMORY] = to_record(state.tensors)


MOST_PROBED = 1 << 16
"""Images of a probe."""


def images_of_probe(probe: object, size: object) -> list[str]:
    """Name the images that leave with a probe, by which each is counted once a round, in whatever batch.

    Args:
        probe: number of the batch, from 0.
        size: of each batch.

    Raises:
        UserError: there is no such probe.
    """
    whole = isinstance(probe, int) and isinstance(size, int) and not isinstance(probe, bool)
    if not whole or probe < 0 or not 1 <= size <= MOST_PROBED:  # type: ignore[operator]
        raise UserError(
            f"A probe is expected to have a number from 0 and a size of 1 to {MOST_PROBED}, but got {probe!r} and"
            f" {size!r}."
        )
    return [f"probed-image-{image}" for image in range(probe * size, (probe + 1) * size)]  # type: ignore[operator]
