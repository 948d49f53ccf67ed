"""Solve for the inputs of a convolution by the slopes at its outputs, behind a ReLU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.exact.convolution import Convolution

_RIDGE = 1e-12
_SHORTCUT = 3.0
"""Weight of an input that a shortcut shows, in units of the mean weight of the gradients' equations."""

_FLIPS = 24
"""Largest number of outputs that are newly taken for silent or not."""

_BETTER = 0.95
"""Share of the residual to which a flip has to reduce it."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """Slopes of the loss, some of which a ReLU has stopped.

    Attributes:
        full: (V, C, H, W) without the ReLU.
        open: (V, C, H, W) bool, the values let through; ``None``: all.
    """

    full: Tensor
    open: Tensor | None = None

    @property
    def values(self) -> Tensor:
        return self.full if self.open is None else self.full * self.open

    def times(self, factor: Tensor) -> "Slopes":
        """Return the slopes in front of a multiplication of channels by ``factor`` (C,)."""
        return Slopes(self.full * factor[:, None, None], self.open)

    def plus(self, other: "Slopes | None") -> "Slopes":
        return self if other is None else Slopes(self.values + other.values)


@dataclass(frozen=True, eq=False)
class Equations:
    """Equations ``slopes`` * inputs = ``gradient`` for a layer's inputs.

    Attributes:
        gradient: (V, O, C, kernel) of its weight, float64.
    """

    layer: Convolution
    slopes: Slopes
    gradient: Tensor

    @property
    def right(self) -> Tensor:
        """Return the right sides (V, O K, C)."""
        return self.gradient.flatten(3).transpose(2, 3).flatten(1, 2)

    @property
    def left(self) -> Tensor:
        """Return the matrices (V, O K, H W)."""
        return self.layer.moved(self.slopes.values)

    def of(self, rows: Tensor) -> "Equations":
        gates = None if self.slopes.open is None else self.slopes.open[rows]
        return Equations(self.layer, Slopes(self.slopes.full[rows], gates), self.gradient[rows])


@dataclass(frozen=True, eq=False)
class KnownInputs:
    """Inputs that are known from elsewhere.

    Attributes:
        often: (V, C, H, W) number of times that each is known.
        sums: (V, C, H, W) sums of its known values.
    """

    often: Tensor
    sums: Tensor


@torch.no_grad()
def gated_inputs(equations: Sequence[Equations], shown: KnownInputs | None = None) -> tuple[Tensor, Tensor]:
    """Solve for the inputs (V, C, H, W), and return the residual share (V,) too.

    Outputs near zero may pass a ReLU only in the client's precision; gates are turned in place while the residual
    falls.
    """
    for own in equations:
        if own.slopes.open is not None and own.layer.module.kernel_size != (1, 1):
            _turn_gates(own, own.slopes.open)
    return _solved(equations, shown)


def _turn_gates(own: Equations, gates: Tensor) -> None:
    """Turn, in place, the ``gates`` (V, O, P, Q) that reduce the residual most."""
    found, left = _solved([own], None)
    flat, going = gates.flatten(1), left > 0
    for _ in range(_FLIPS):
        gain, place = _gains(own, gates, found).flatten(1).max(1)
        going = going & (gain > 0)
        if not going.any():
            return
        rows = going.nonzero().flatten()
        flat[rows, place[rows]] ^= True
        gates.copy_(flat.view_as(gates))
        trial, after = _solved([own], None)
        better = going & (after < _BETTER * left)
        undone = (going & ~better).nonzero().flatten()
        flat[undone, place[undone]] ^= True
        gates.copy_(flat.view_as(gates))
        found = torch.where(better[:, None, None, None], trial, found)
        left, going = torch.where(better, after, left), better


def _solved(equations: Sequence[Equations], shown: KnownInputs | None) -> tuple[Tensor, Tensor]:
    left = torch.cat([each.left for each in equations], 1)
    right = torch.cat([each.right for each in equations], 1)
    normal, sums = left.mT @ left, left.mT @ right  # (V, P, P), (V, P, C)
    scale = normal.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(left.dtype).tiny)[:, None, None]
    normal, sums = normal / scale, sums / scale
    normal.diagonal(dim1=1, dim2=2).add_(_RIDGE)
    if shown is None:
        found = torch.linalg.solve_ex(normal, sums)[0].mT
    else:
        often = _SHORTCUT * shown.often.flatten(2)
        each = normal[:, None] + torch.diag_embed(often)
        known = sums.mT + _SHORTCUT * shown.sums.flatten(2)
        found = torch.linalg.solve_ex(each, known[..., None])[0][..., 0]
    apart = (left @ found.mT - right).flatten(1).norm(dim=1)
    share = apart / right.flatten(1).norm(dim=1).clamp_min(torch.finfo(left.dtype).tiny)
    return found.reshape(-1, *equations[0].layer.shape), torch.where(share.isfinite(), share, torch.inf)


def _gains(own: Equations, gates: Tensor, found: Tensor) -> Tensor:
    """Return the gain of turning each gate (V, O, P, Q), in the squared residual."""
    left = own.left
    outputs = own.slopes.full.shape[1]
    step = torch.where(gates, -own.slopes.full, own.slopes.full).flatten(2)  # (V, O, P)
    rest = own.right - left @ found.flatten(2).mT
    rest = rest.reshape(len(rest), outputs, -1, rest.shape[2])  # (V, O, K, C)
    module, (down, across) = own.layer.module, own.layer.padding
    seen = F.unfold(found, module.kernel_size, module.dilation, (down, across), module.stride)
    seen = seen.reshape(*found.shape[:2], -1, seen.shape[2])  # (V, C, K, P) inputs that each tap sees
    inner = torch.einsum("vokc,vckp->vop", rest, seen)
    normal = left.mT @ left
    normal.diagonal(dim1=1, dim2=2).add_(_RIDGE * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True))
    lower, _ = torch.linalg.cholesky_ex(normal)
    thin = torch.linalg.solve_triangular(lower, left.mT, upper=False)
    thin = thin.reshape(*thin.shape[:2], outputs, -1)  # (V, N, O, K)
    taken = torch.einsum("vnok,vnol->vokl", thin, thin)
    free = torch.eye(taken.shape[-1], dtype=taken.dtype, device=taken.device) - taken
    squared = torch.einsum("vokl,vklp->vop", free, torch.einsum("vckp,vclp->vklp", seen, seen))
    gain = 2 * inner * step - step.square() * squared
    return torch.where(gain.isfinite(), gain, 0).reshape(gates.shape)
