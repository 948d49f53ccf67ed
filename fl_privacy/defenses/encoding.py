"""Lossless compression of updates with zeros or few distinct values."""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_privacy.defenses._quantization import from_grid, largest_code, round_to_codes, to_grid
from fl_privacy.errors import UserError
from fl_privacy.types import Tensors

_DENSE, _BITMAP, _INDICES = range(3)
_HEADER = 6
"""Bytes of the header: one for the layout of positions, one for the bits per code (0: raw), four for the count."""

_MAX_BITS = 28
_PROBE, _AHEAD = 256, 4096  # values to check first for an even grid, and elements among which they are sought
_GLANCE = 64  # values for a still faster check, which suffices for most updates

_CODES = np.array([[float(largest_code(bits))] for bits in range(1, _MAX_BITS + 1)])
"""Largest code by number of bits, from 1, (bits, 1)."""


def encode(tensors: Tensors) -> dict[str, Tensor]:
    """Encode each tensor losslessly, by the shortest of a few encodings.

    Zeros are left out if that saves bytes; evenly spaced values become codes. ``tensors`` are floating-point, with up
    to 2^32 - 1 elements each; results are (bytes,) uint8 on the CPU, without shape and dtype.
    """
    return {name: torch.from_numpy(np.frombuffer(_encode(t), dtype=np.uint8).copy()) for name, t in tensors.items()}


def decode(encoded: Tensors, like: Tensors) -> dict[str, Tensor]:
    """Return the tensors that ``encode`` encoded; ``UserError`` if a name is unknown or the bytes do not fit.

    ``like`` has the expected shapes and dtypes by name, and may hold more names than ``encoded``.
    """
    if unknown := encoded.keys() - like.keys():
        raise UserError(f"An update is expected to have the model's names, but has {sorted(unknown)}; use its model.")
    decoded = {}
    for name, payload in encoded.items():
        try:
            decoded[name] = _decode(payload.cpu().numpy().tobytes(), like[name])
        except (ValueError, IndexError, RuntimeError) as error:
            raise UserError(
                f"The encoded tensor {name} is expected to hold {tuple(like[name].shape)} {like[name].dtype} values,"
                f" but got {payload.numel()} bytes ({error}); encode it by defenses.encoding.encode."
            ) from error
    return decoded


def encoded_bytes(tensors: Tensors) -> int:
    """Return the size of ``tensors`` in bytes, each encoded or raw, whichever is shorter; names do not count."""
    total = 0
    for tensor in (tensor.detach().cpu() for tensor in tensors.values()):
        raw = tensor.dtype in (torch.float32, torch.float64) and plainly_shortest(tensor.numpy())
        total += tensor.nbytes if raw else min(_HEADER + _Layout(tensor).bytes, tensor.nbytes)
    return total


def plainly_shortest(array: NDArray[np.generic]) -> bool:
    """Return whether a sample of values shows that ``encode`` can't shorten ``array``, so that it need not be tried.

    ``encode`` shortens arrays with enough zeros, or with values that are multiples of one step.
    """
    if array.dtype not in (np.float32, np.float64) or not array.size:
        return False
    values = array.reshape(-1)
    present = np.count_nonzero(values)
    if 128 * (values.size - present) >= values.size:
        return False
    few = values[:: max(1, values.size // _GLANCE)]
    few, scale = few[few != 0], np.float64(max(values.max(), -values.min()))
    with np.errstate(invalid="ignore"):
        fits = (scale * (few / scale * _CODES).round() / _CODES).astype(few.dtype) == few
    grids = np.flatnonzero(fits.all(1))
    if not few.size or not grids.size:
        return bool(few.size)
    return _HEADER + _values_bytes(int(present), int(grids[0]) + 1, 8 * values.itemsize) >= array.nbytes


class _Layout:
    def __init__(self, tensor: Tensor) -> None:
        self.flat = flat = tensor.detach().cpu().flatten()
        self.present = _bits_of(flat) != 0  # a negative zero counts
        n, k, raw_bits = len(flat), int(self.present.count_nonzero()), 8 * flat.element_size()
        self.bits = bits = self._grid_bits(min(_MAX_BITS, raw_bits - 1)) if k else 0
        self.dense_bits = max(bits, 2) if bits and k < n else bits  # a grid of one bit has no zero
        sizes = {
            _DENSE: _values_bytes(n, self.dense_bits, raw_bits),
            _BITMAP: packed_bytes(n, 1) + _values_bytes(k, bits, raw_bits),
            _INDICES: packed_bytes(k, _index_bits(n)) + _values_bytes(k, bits, raw_bits),
        }
        self.how = min(sizes, key=sizes.__getitem__)
        self.bytes = sizes[self.how]

    @cached_property
    def nonzero(self) -> Tensor:
        return self.flat[self.present]

    def _grid_bits(self, most: int) -> int:
        # bits of a value if the nonzero ones are multiples of one step, else 0
        scale, codes, ahead = self.flat.abs().amax(), torch.from_numpy(_CODES)[:most], self.present[:_AHEAD]
        few = (self.flat[:_AHEAD][ahead] if ahead.count_nonzero() >= _GLANCE else self.nonzero)[:_PROBE]
        fits = (few.double() / scale.double() * codes).round_().mul_(scale.double()).div_(codes).to(few.dtype) == few
        for bits in (fits.all(1).nonzero().flatten() + 1).tolist():
            nearest = from_grid(round_to_codes(to_grid(self.nonzero, scale, bits), bits), scale, bits)
            if torch.equal(_bits_of(nearest), _bits_of(self.nonzero)):
                return int(bits)
        return 0


def _encode(tensor: Tensor) -> bytes:
    layout, positions = _Layout(tensor), b""
    if layout.how == _BITMAP:
        positions = np.packbits(layout.present.numpy()).tobytes()
    elif layout.how == _INDICES:
        positions = pack(layout.present.nonzero().squeeze(1).numpy(), _index_bits(len(layout.flat)))
    values, bits = (layout.flat, layout.dense_bits) if layout.how == _DENSE else (layout.nonzero, layout.bits)
    header = bytes([layout.how, bits]) + len(values).to_bytes(4, "little")
    if bits == 0:
        return header + positions + values.contiguous().view(torch.uint8).numpy().tobytes()
    scale = values.abs().max()
    codes = round_to_codes(to_grid(values, scale, bits), bits).long() + largest_code(bits)
    packed = pack((codes >> (bits == 1)).numpy(), bits)
    return header + positions + scale.reshape(1).view(torch.uint8).numpy().tobytes() + packed


def _decode(payload: bytes, like: Tensor) -> Tensor:
    n = like.numel()
    how, bits, k = payload[0], payload[1], int.from_bytes(payload[2:_HEADER], "little")
    if k > n or (how == _DENSE and k != n) or how > _INDICES or bits > _MAX_BITS:
        raise ValueError("inconsistent header")
    positions_bytes = {_DENSE: 0, _BITMAP: packed_bytes(n, 1), _INDICES: packed_bytes(k, _index_bits(n))}[how]
    positions, values = payload[_HEADER : _HEADER + positions_bytes], payload[_HEADER + positions_bytes :]
    if len(values) != _values_bytes(k, bits, 8 * like.element_size()):
        raise ValueError("wrong length")
    decoded = _decode_values(values, k, bits, like.dtype)
    if how == _DENSE:
        return decoded.view(like.shape)
    if how == _BITMAP:
        indices = np.flatnonzero(np.unpackbits(np.frombuffer(positions, np.uint8), count=n))
    else:
        indices = unpack(positions, k, _index_bits(n))
    return torch.zeros(n, dtype=like.dtype).index_copy_(0, torch.from_numpy(indices), decoded).view(like.shape)


def _decode_values(payload: bytes, k: int, bits: int, dtype: torch.dtype) -> Tensor:
    if k == 0:
        return torch.empty(0, dtype=dtype)
    if bits == 0:
        return torch.frombuffer(bytearray(payload), dtype=dtype)
    scale = torch.frombuffer(bytearray(payload[: dtype.itemsize]), dtype=dtype)
    codes = torch.from_numpy(unpack(payload[dtype.itemsize :], k, bits)) << (bits == 1)
    return from_grid(codes - largest_code(bits), scale, bits)


def _bits_of(values: Tensor) -> Tensor:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(kinds[values.element_size()])


def _values_bytes(count: int, bits: int, raw_bits: int) -> int:
    if bits == 0 or count == 0:
        return packed_bytes(count, raw_bits)
    return raw_bits // 8 + packed_bytes(count, bits)


def _index_bits(n: int) -> int:
    return max(1, (n - 1).bit_length())


_CHUNK = 1 << 18  # numbers packed at once, a multiple of 8 so that each chunk ends on a whole byte


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes of ``count`` packed numbers of ``bits`` bits."""
    return (count * bits + 7) // 8


def pack(numbers: NDArray[np.integer], bits: int) -> bytes:
    """Pack numbers (n,) in [0, 2^bits), 1 to 32 bits each, into bytes, highest bit first."""
    parts = []
    for start in range(0, len(numbers), _CHUNK):
        chunk = numbers[start : start + _CHUNK].astype(">u4")
        parts.append(np.packbits(np.unpackbits(chunk.view(np.uint8).reshape(-1, 4), axis=1)[:, 32 - bits :]).tobytes())
    return b"".join(parts)


def unpack(packed: bytes, count: int, bits: int) -> NDArray[np.int64]:
    """Return the ``count`` numbers of ``bits`` bits that ``pack`` packed."""
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
