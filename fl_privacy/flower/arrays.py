"""Arrays as Flower serializes them, without parsing a header for each: most are alike."""

from functools import lru_cache
from io import BytesIO

import numpy as np
from flwr.app import Array

STYPE = "numpy.ndarray"
"""Flower's serialization type of NumPy's own format."""


def plain_array(values: np.ndarray) -> Array:
    """``Array.from_numpy_ndarray(values)``, byte for byte."""
    values = np.asarray(values, order="C")
    if values.dtype.hasobject or values.dtype.names is not None:
        return Array.from_numpy_ndarray(values)
    dtype, shape = str(values.dtype), tuple(values.shape)
    return Array(dtype=dtype, shape=shape, stype=STYPE, data=_header(dtype, shape) + values.tobytes())


def array_values(array: Array) -> np.ndarray:
    """``array.numpy()``, read-only where the bytes are those that ``plain_array`` writes."""
    dtype, shape = array.dtype, tuple(array.shape)
    if array.stype == STYPE and dtype in _PLAIN:
        header = _header(dtype, shape)
        if len(array.data) == len(header) + _PLAIN[dtype] * _size(shape) and array.data.startswith(header):
            return np.frombuffer(array.data, dtype=dtype, offset=len(header)).reshape(shape)
    values: np.ndarray = array.numpy()
    return values


_PLAIN = {
    str(dtype): dtype.itemsize
    for dtype in map(np.dtype, ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"))
}
"""Bytes of an element by the name of its type."""


@lru_cache(maxsize=4096)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What ``numpy.save`` writes before the values."""
    buffer = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
