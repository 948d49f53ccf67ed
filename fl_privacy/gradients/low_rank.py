"""Factors of gradients that are never formed.

The gradient of a weight is ``G = delta U'`` with the outputs' gradients ``delta`` (O, P) and the inputs ``U`` (D, P) at
P positions, and an observed ``G* = L C R'`` that no defense has touched has rank P as well, with orthonormal L and R.
What of ``delta`` and ``U`` lies along L and R is told apart from the rest: the distance of G and G* is then a sum of
three squares, of which only ``|L' delta U' R - C|^2`` is a difference. Where P is small against O and D, this costs
less than G itself, and keeps its digits where G comes near G*.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_SPARE = 4
_EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True, eq=False)
class Factors:
    """``G* = left core right'`` of each victim: orthonormal left (V, O, r) and right (V, D, q), core (V, r, q)."""

    left: Tensor
    core: Tensor
    right: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Factors":
        """With all changed."""
        return Factors(change(self.left), change(self.core), change(self.right))


def pays(outputs: int, inputs: int, positions: int) -> bool:
    """Whether the products cost less than the gradient."""
    return 3 * positions * (outputs + inputs) < outputs * inputs


def factorize(value: Tensor, rank: int) -> Factors | None:
    """Factors of ``value`` (V, O, D) by a random range finder (Halko, Martinsson, Tropp 2011, Alg. 4.1).

    ``None`` where the rank of a victim is higher, as after noise or pruning.
    """
    columns = min(rank + _SPARE, *value.shape[1:])
    probe = torch.randn(value.shape[2], columns, generator=torch.Generator().manual_seed(0)).to(value)
    left = torch.linalg.qr(value @ probe).Q
    right, core = torch.linalg.qr(value.mT @ left)
    residual = torch.baddbmm(value, left @ core.mT, right.mT, alpha=-1).flatten(1).norm(dim=1)
    if (residual > _EXACT[value.dtype] * value.flatten(1).norm(dim=1)).any():
        return None
    return Factors(left, core.mT.contiguous(), right)
