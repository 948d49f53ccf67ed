"""What entered a convolution, up to a factor, from the gradient of its weight alone.

With D_k the gradient (O, C) of the weight at tap k, G (O, P) the slopes of the loss by the outputs, A (C, N) what
entered, and S_k (P, N) the zeros and ones of which input place tap k takes to which output place, D_k = G S_k A'. Both
factors are unknown. But the S_k of a kernel and zero padding leave no freedom: where A has a right inverse H, that is
where there are as many channels as places, D_k H = G S_k is linear in both H and G, and its solution is unique up to
a factor, since nothing but a multiple of the identity commutes with shifts to all sides that end at the edges.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.exact.convolution import Convolution

MOST_UNKNOWNS = 4608
"""Of one system: 64 channels by 64 places are 4,096, which take 130 MB and 23 billion multiplications."""

_RANK = 1e-7
"""Singular values below this share of the largest are rounding of single precision."""

_RIDGE = 1e-12
_STEPS = 4
"""Of inverse iteration, for the two least eigenvalues, which are a million times apart where there is a solution."""


@dataclass(frozen=True, eq=False)
class BlindInputs:
    """The inputs of a layer that solve the equations of one victim best.

    Attributes:
        values: (C, H, W), mean absolute value 1, of either sign.
        left: what they leave of the equations, squared, as a share of what a random guess does.
        next: the same of the second best, at right angles to it.
    """

    values: Tensor
    left: float
    next: float

    @property
    def unique(self) -> bool:
        """Say whether these solve the equations to rounding, and others do not."""
        return self.left < 1e-6 and self.left < 1e-3 * self.next


def can_be_blind(layer: Convolution) -> bool:
    """Say whether a layer may have enough channels for its places, and few enough of both."""
    places = layer.shape[1] * layer.shape[2]
    taps = layer.module.kernel_size[0] * layer.module.kernel_size[1]
    return layer.shape[0] >= places and places * places <= MOST_UNKNOWNS and 4 <= taps <= 25


@torch.no_grad()
def inputs_up_to_a_factor(layer: Convolution, gradient: Tensor) -> BlindInputs | None:
    """Solve ``gradient = slopes * inputs`` for both, and return the inputs; ``None`` where these are too alike.

    Args:
        layer: for which :func:`can_be_blind`.
        gradient: (O, C, kernel) of its weight, float64, of one image.
    """
    channels, places = layer.shape[0], layer.shape[1] * layer.shape[2]
    taps = gradient.flatten(2).permute(2, 0, 1)  # (K, O, C)
    length = taps.norm()
    if not length > 0 or not length.isfinite():
        return None
    _, values, right = torch.linalg.svd((taps / length).reshape(-1, channels), full_matrices=False)
    rank = int((values > _RANK * values[0]).sum())
    if rank < places:
        return None
    basis = right[:places].T / values[:places] * values[0]
    # the places that each tap takes to each output, (K, P, N) of zeros and ones
    size = layer.outputs(gradient.new_zeros(1, *layer.shape)).shape[2:]
    number = size[0] * size[1]
    alone = torch.eye(number, dtype=gradient.dtype, device=gradient.device).reshape(1, number, *size)
    matrix = _normal_matrix(
        layer.moved(alone).reshape(number, -1, layer.shape[1] * layer.shape[2]).transpose(0, 1), taps / length @ basis
    )
    least, vector = _least_eigenpairs(matrix)
    inverse = basis @ vector.reshape(places, places)
    found = torch.linalg.pinv(inverse, rtol=1e-9).T
    return BlindInputs((found / found.abs().mean()).reshape(layer.shape), float(least[0]), float(least[1]))


def _normal_matrix(shifts: Tensor, taps: Tensor) -> Tensor:
    """Return the matrix (R N, R N) of what X (R, N) leaves of ``taps`` X = Y ``shifts``, squared, with the best Y.

    Divided by its mean eigenvalue.

    Args:
        shifts: (K, P, N).
        taps: (K, O, R).
    """
    count, places, rank = len(shifts), shifts.shape[2], taps.shape[2]
    often = shifts.square().sum((0, 2)).clamp_min(1)
    products = torch.einsum("kor,los->klrs", taps, taps).reshape(count * count, -1)
    kept = -torch.einsum("kpa,lpb->klab", shifts, shifts / often[:, None])
    for tap in range(count):
        kept[tap, tap] += torch.eye(places, dtype=taps.dtype, device=taps.device)
    matrix = products.T @ kept.reshape(count * count, -1)
    matrix = matrix.reshape(rank, rank, places, places).transpose(1, 2).reshape(rank * places, rank * places)
    return matrix / matrix.diagonal().mean()


def _least_eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two least eigenvalues (2,) of a matrix without negative ones, and the vector of the least."""
    size = len(matrix)
    matrix.diagonal().add_(_RIDGE)
    lower = torch.linalg.cholesky(matrix)
    rng = torch.Generator().manual_seed(0)
    block = torch.randn(size, 2, dtype=matrix.dtype, generator=rng).to(matrix.device)
    for _ in itertools.repeat(None, _STEPS):
        block, _ = torch.linalg.qr(torch.cholesky_solve(block, lower))
    values, vectors = torch.linalg.eigh(block.T @ matrix @ block)
    return values, (block @ vectors)[:, 0]
