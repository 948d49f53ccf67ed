"""Strided convolutions of few channels by other operations: oneDNN's kernels are fast where channels are many."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch.nn.functional as F
from torch import Tensor

_NARROW, _MANY = 12, 16
"""Input channels up to which phases are faster, and images from which they are, where kernels span two strides."""

_FEW = 4
"""Input channels of a victim up to which products beat a convolution with a group for each victim."""

_Pair = Sequence[int]

_compiles = ContextVar("compiles", default=False)


@contextmanager
def for_a_compiler() -> Iterator[None]:
    """Operations chosen within are compiled: ``F.fold`` is left out, of which a compiler makes scattered writes."""
    token = _compiles.set(True)
    try:
        yield
    finally:
        _compiles.reset(token)


def better_by_phases(weight: Tensor, images: int, stride: _Pair, dilation: _Pair, groups: int) -> bool:
    """Whether :func:`transposed` is the faster transpose of a convolution of so many ``images``."""
    alike = 1 < stride[0] == stride[1] and tuple(dilation) == (1, 1) and groups == 1
    small = weight.shape[1] <= _NARROW and images >= _MANY and min(weight.shape[2:]) > 2 * stride[0]
    return alike and small and weight.device.type == "cpu"


def better_by_products(images: Tensor, weight: _Pair, stride: _Pair, dilation: _Pair) -> bool:
    """Whether products and ``F.fold`` are the faster transpose for victims side by side, (1, V C, H, W).

    Args:
        weight: the shape (V O, C, h, w) of all victims' gradients.
    """
    apart = stride[0] > 1 and tuple(dilation) == (1, 1) and images.shape[1] > weight[1] and not _compiles.get()
    return apart and len(images) == 1 and images.device.type == "cpu" and weight[1] <= _FEW


def transposed(back: Tensor, weight: Tensor, shape: Sequence[int], stride: int, padding: _Pair) -> Tensor:
    """The gradient (N, C, H, W) by the images of a convolution, as one convolution of its output gradients.

    An image's pixels whose rows and columns leave the same remainders on division by the stride see the same part of
    the kernel: each such phase is a convolution without stride, and all phases are the outputs of one.

    Args:
        back: (N, O, h, w) output gradients.
        weight: (O, C, kh, kw).
        shape: (N, C, H, W).
        stride: in both directions.
        padding: by zeros.
    """
    (outer, inner), counts = weight.shape[:2], [-(-size // stride) for size in shape[2:]]
    phases = [_phases(size, stride, pad) for size, pad in zip(weight.shape[2:], padding, strict=True)]
    before = [max(0, *(taps - 1 - shift for _, taps, shift in own)) for own in phases]
    after = [max(shift for *_, shift in own) for own in phases]
    kernel = weight.new_zeros(inner, stride, stride, outer, *(b + a + 1 for b, a in zip(before, after, strict=True)))
    swapped = weight.transpose(0, 1)
    for row, (top, high, down) in enumerate(phases[0]):
        for column, (left, wide, right) in enumerate(phases[1]):
            rows = slice(before[0] + down + 1 - high, before[0] + down + 1)
            columns = slice(before[1] + right + 1 - wide, before[1] + right + 1)
            kernel[:, row, column, :, rows, columns] = swapped[..., top::stride, left::stride].flip(-1, -2)
    ends = [n - size + more for n, size, more in zip(counts, back.shape[2:], after, strict=True)]
    pads = [max(first, last) for first, last in zip(before, ends, strict=True)]
    found = F.conv2d(back, kernel.flatten(0, 2), padding=pads)
    tall, broad = (slice(p - b, p - b + n) for p, b, n in zip(pads, before, counts, strict=True))
    return F.pixel_shuffle(found[:, :, tall, broad], stride)[:, :, : shape[2], : shape[3]]


def _phases(size: int, stride: int, padding: int) -> list[tuple[int, int, int]]:
    """For each remainder the first position in a kernel of ``size`` that it meets, how many, and their shift."""
    firsts = [(remainder + padding) % stride for remainder in range(stride)]
    return [(first, len(range(first, size, stride)), (place + padding) // stride) for place, first in enumerate(firsts)]
