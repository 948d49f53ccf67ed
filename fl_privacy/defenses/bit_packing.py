"""Whole numbers of few bits, one after the other without gaps."""

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 18
"""Numbers at a time, a multiple of 8 so that chunks end on whole bytes; bounds the memory of the single bits."""


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of ``count`` numbers of ``bits`` bits."""
    return (count * bits + 7) // 8


def pack(numbers: NDArray[np.integer], bits: int) -> bytes:
    """(n,) numbers in [0, 2^bits) with ``bits`` from 1 to 32, highest bit first; the last byte is filled with zeros."""
    parts = []
    for start in range(0, len(numbers), _CHUNK):
        chunk = numbers[start : start + _CHUNK].astype(">u4")
        single = np.unpackbits(chunk.view(np.uint8).reshape(-1, 4), axis=1)[:, 32 - bits :]
        parts.append(np.packbits(single).tobytes())
    return b"".join(parts)


def unpack(packed: bytes, count: int, bits: int) -> NDArray[np.int64]:
    """The ``count`` numbers that ``pack`` packed."""
    data = np.frombuffer(packed, dtype=np.uint8)
    numbers = np.empty(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        first = start * bits // 8
        single = np.unpackbits(data[first : first + packed_bytes(size, bits)], count=size * bits).reshape(size, bits)
        padded = np.zeros((size, 32), dtype=np.uint8)
        padded[:, 32 - bits :] = single
        numbers[start : start + size] = np.packbits(padded, axis=1).view(">u4").squeeze(1)
    return numbers
