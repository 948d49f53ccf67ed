"""Solve for the inputs of a convolution, up to a factor, from the gradient of its weight alone.

At tap k it is D_k = G S_k A', with slopes G (O, P), inputs A (C, N) and shifts S_k (P, N); if A has a right inverse H,
as with many channels, D_k H = G S_k is linear in H and G and unique up to a factor.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.exact.convolution import Convolution

MOST_UNKNOWNS = 4608
"""Largest number of unknowns of a system: 64 channels by 64 places are 4,096, which take 130 MB and 23 billion
multiplications."""

_RANK = 1e-7
"""Singular values below this share of the largest are rounding of single precision."""

_RIDGE = 1e-12
_STEPS = 4
"""Steps of inverse iteration for the two least eigenvalues, which are a million times apart if there is a solution."""


@dataclass(frozen=True, eq=False)
class BlindInputs:
    """The inputs of a layer that solve the equations of one victim best.

    Attributes:
        values: (C, H, W), mean absolute value 1, of either sign.
        left: squared residual, as a share of a random guess's.
        next: the same for the second best, orthogonal inputs.
    """

    values: Tensor
    left: float
    next: float

    @property
    def unique(self) -> bool:
        """Return ``True`` if only these solve the equations to rounding."""
        return self.left < 1e-6 and self.left < 1e-3 * self.next


def can_be_blind(layer: Convolution) -> bool:
    """Return ``True`` if a layer may have enough channels for its places, and few enough of both."""
    places = layer.shape[1] * layer.shape[2]
    taps = layer.module.kernel_size[0] * layer.module.kernel_size[1]
    return layer.shape[0] >= places and places * places <= MOST_UNKNOWNS and 4 <= taps <= 25


@torch.no_grad()
def inputs_up_to_a_factor(layer: Convolution, gradient: Tensor) -> BlindInputs | None:
    """Solve ``gradient = slopes * inputs`` for both, and return the inputs; ``None`` if the rank is too low.

    Args:
        gradient: (O, C, kernel) of the weight, float64, for one image.
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
    # each tap's input place of each output, (K, P, N) of zeros and ones
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
    """Return the matrix (R N, R N) of the squared residual of ``taps`` X = Y ``shifts`` with the best Y.

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
    """Return the two least eigenvalues (2,) of a positive semidefinite matrix, and the vector of the least."""
    size = len(matrix)
    matrix.diagonal().add_(_RIDGE)
    lower = torch.linalg.cholesky(matrix)
    rng = torch.Generator().manual_seed(0)
    block = torch.randn(size, 2, dtype=matrix.dtype, generator=rng).to(matrix.device)
    for _ in itertools.repeat(None, _STEPS):
        block, _ = torch.linalg.qr(torch.cholesky_solve(block, lower))
    values, vectors = torch.linalg.eigh(block.T @ matrix @ block)
    return values, (block @ vectors)[:, 0]
