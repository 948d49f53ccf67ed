"""Inner products of gradients that are never formed.

The gradient of a weight is ``G = delta U'`` with the outputs' gradients ``delta`` (O, P) and the inputs ``U`` (D, P) at
P positions. Where P is small against O and D, ``<G, G*> = <delta, G* U>`` and ``|G|^2 = <delta' delta, U' U>`` cost
less than G itself; and an observed ``G*`` that no defense has touched has rank P, so that its factors are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_SPARE = 4
_EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True, eq=False)
class Factors:
    """``G* = left right'`` of each victim: left (V, O, r), right (V, D, r)."""

    left: Tensor
    right: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Factors":
        """With both changed."""
        return Factors(change(self.left), change(self.right))


def pays(outputs: int, inputs: int, positions: int) -> bool:
    """Whether the products cost less than the gradient."""
    return 2 * positions * (outputs + inputs) < outputs * inputs


def factorize(value: Tensor, rank: int) -> Factors | None:
    """Factors of ``value`` (V, O, D) by a random range finder (Halko, Martinsson, Tropp 2011, Alg. 4.1).

    ``None`` where the rank of a victim is higher, as after noise or pruning.
    """
    columns = min(rank + _SPARE, *value.shape[1:])
    probe = torch.randn(value.shape[2], columns, generator=torch.Generator().manual_seed(0)).to(value)
    left = torch.linalg.qr(value @ probe).Q
    right = value.mT @ left
    residual = torch.baddbmm(value, left, right.mT, alpha=-1).flatten(1).norm(dim=1)
    if (residual > _EXACT[value.dtype] * value.flatten(1).norm(dim=1)).any():
        return None
    return Factors(left, right)
