"""Inner products of gradients that are never formed.

The gradient of a weight is ``G = delta U'`` with the outputs' gradients ``delta`` (O, P) and the inputs ``U`` (D, P) at
P positions. Where P is small against O and D, ``<G, G*> = <delta, G* U>`` and ``|G|^2 = <delta' delta, U' U>`` cost
less than G itself; and an observed ``G*`` that no defense has touched has rank P, so that its factors are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.statistics import Target

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


@dataclass(frozen=True, eq=False)
class Products:
    """Statistics of the gradient ``deltas @ inputs.mT`` of one weight.

    Attributes:
        deltas: (V, O, P).
        inputs: (V, D, P).
        factors: of the observed gradient.
        target: its numbers; its value is not used.
    """

    deltas: Tensor
    inputs: Tensor
    factors: Factors
    target: Target

    @property
    def dot(self) -> Tensor:
        """<g', g>."""
        return ((self.factors.left.mT @ self.deltas) * (self.factors.right.mT @ self.inputs)).sum((1, 2))

    @property
    def squared(self) -> Tensor:
        """||g'||^2."""
        return ((self.deltas.mT @ self.deltas) * (self.inputs.mT @ self.inputs)).sum((1, 2))

    @property
    def distance(self) -> Tensor:
        """||g' - g||^2, to the accuracy of a difference of squares."""
        return self.squared - 2 * self.dot + self.target.squared

    @property
    def absolute(self) -> Tensor:
        """Sum of |g' - g|, for which the gradient is formed."""
        seen = self.factors.left @ self.factors.right.mT
        return (self.deltas @ self.inputs.mT - seen).abs().sum((1, 2))
