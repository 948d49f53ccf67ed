"""Where the model stands in a message: one record of arrays, and nothing beside it."""

from collections.abc import Sequence

import numpy as np
from flwr.app import Array, RecordDict

from fl_privacy.errors import UserError
from fl_privacy.types import Tensors

PARAMETERS = "parameters"
BUFFERS = "buffers"
"""Names of the two records in which clients of this package and their server send models."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Last names of batch norm's buffers."""

FLOATING = ("float16", "float32", "float64")
"""What a floating-point value may be sent as."""

Places = dict[str, tuple[str, str]]
"""By the model's name: the record in which an array stands, and its key there."""


def places_of_model(content: RecordDict, like: Tensors, *, whole: bool = False) -> Places:
    """Where the values of the model stand in a message: the one reader, for guard, defense and audit alike.

    A message has one record of arrays that are not empty, or ours, ``parameters`` and ``buffers``, which have no name
    in common. All arrays in it are of the model by name, shape and kind of numbers, in the order in which they came;
    "0", "1", ... are the names of the model in its order. What one reader would skip and another one train on (a second
    record, a name that is not the model's, a floating-point value as whole or complex numbers) is refused.

    Args:
        content: of a message from either side.
        like: the values of the model by name, in the order of its ``state_dict()``.
        whole: the message has all parameters in the model's order, so that those who read it by position see the same
            as those who read it by name. Only batch norm may be missing, which some clients keep for themselves: all of
            it, its statistics, or its counters.

    Raises:
        UserError: one line that says what does not fit.
    """
    placed = placed_arrays(content)
    keys = [key for _, key in placed]
    names = list(like) if keys == [str(i) for i in range(len(like))] else keys
    places = dict(zip(names, placed, strict=True))
    for name, (place, key) in places.items():
        _expect_fits(name, content.array_records[place][key], like)
    if whole:
        _expect_whole(list(places), like)
        for record in content.array_records:
            _expect_in_order([name for name, (place, _) in places.items() if place == record], like)
    return places


def placed_arrays(content: RecordDict) -> dict[tuple[str, str], Array]:
    """Every array of the one record of ``content``, by record and key."""
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
        raise UserError(f"Arrays of a message are expected to be the model's, but {name!r} is not among its names.")
    known = like[name]
    if tuple(array.shape) != tuple(known.shape):
        raise UserError(
            f"{name} is expected to have the shape {tuple(known.shape)}, but has {tuple(array.shape)};"
            " it is not of the architecture agreed on."
        )
    fits = array.dtype in FLOATING if known.is_floating_point() else _kind(array.dtype) in "fiub"
    if not fits:  # strategies make fractions of counters: these may come as either
        raise UserError(
            f"{name} is expected to be of {str(known.dtype).removeprefix('torch.')} as in the model, but is of"
            f" {array.dtype}; the message is refused."
        )


def _kind(dtype: str) -> str:
    try:
        return np.dtype(dtype).kind
    except TypeError:
        return "?"


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


def _expect_in_order(names: Sequence[str], like: Tensors) -> None:
    expected = [name for name in like if name in names]
    if moved := [got for got, wanted in zip(names, expected, strict=True) if got != wanted]:
        raise UserError(
            f"The model is expected in the order of its state_dict(), but {moved[0]} stands in another place: who reads"
            " it by position would read something else."
        )


def expect_listed(names: Sequence[str], listed: Sequence[str]) -> None:
    """Refuse arrays ``names`` of a message where only the names ``listed`` of parameters are known, or of all arrays.

    Each array is one of ``listed``, in that order, or a statistic of batch norm, directly behind the parameters of its
    layer: a client that reads by position must not train a parameter under the name of a statistic.

    Raises:
        UserError: one line that says what does not fit.
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
                f"{name} is none of the names given, and no statistic behind the parameters of its layer; give model=,"
                " or the names of all arrays in their order."
            )
        before = name
