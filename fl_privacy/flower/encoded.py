"""Arrays that are shorter on the wire, under Flower's own extension point: the serialization type of an ``Array``."""

import math

import numpy as np
import torch
from flwr.app import Array

from fl_privacy.defenses.compression.encoding import decode, encode
from fl_privacy.errors import UserError
from fl_privacy.types import Tensors

STYPE = "fl_privacy.encoded"
"""Serialization type of arrays that ``defenses.encoding`` encoded."""


def shortest(array: np.ndarray) -> Array:
    """``array`` encoded without loss if that is shorter (zeros, few levels), else as Flower serializes it."""
    plain = Array.from_numpy_ndarray(array)
    if not np.issubdtype(array.dtype, np.floating):
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
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    claimed = torch.empty(tuple(array.shape), dtype=dtype, device="meta")
    return decode({name: torch.from_numpy(np.frombuffer(array.data, dtype=np.uint8).copy())}, {name: claimed})[name]
