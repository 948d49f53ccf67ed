"""The evenly spaced values that quantized tensors take."""

import torch
from torch import Tensor


def largest_code(bits: int) -> int:
    """Codes lie in [-c, c]: 2^bits - 1 of them with 0 in the middle, except that one bit has the codes -1 and 1."""
    return 1 if bits == 1 else 2 ** (bits - 1) - 1


def to_grid(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Real-valued codes in [-c, c] as float64, not yet rounded, for ``values`` in [-scale, scale]."""
    return values.double() / scale.double() * largest_code(bits)


def round_to_codes(positions: Tensor, bits: int) -> Tensor:
    """The nearest code of each position; of one bit, the sign, with that of 0 positive."""
    if bits == 1:
        return torch.where(positions < 0, -1.0, 1.0).double()
    return positions.round()


def from_grid(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The values of ``codes``, in the dtype of ``scale``."""
    return (scale.double() * (codes.double() + 0.0) / largest_code(bits)).to(scale.dtype)  # + 0.0 makes -0.0 positive
