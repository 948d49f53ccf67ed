"""Inner products of gradients that are never formed.

The gradient of a weight is ``G = delta U'`` with the outputs' gradients ``delta`` (O, P) and the inputs ``U`` (D, P) at
P positions, and an observed ``G* = L C R'`` that no defense has touched has rank P as well, with orthonormal L and R.
What of ``delta`` and ``U`` lies along L and R is told apart from the rest: the distance of G and G* is then a sum of
three squares, of which only ``|L' delta U' R - C|^2`` is a difference. Where P is small against O and D, this costs
less than G itself, and keeps its digits where G comes near G*.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.attacks.statistics import Target

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
    def squared(self) -> Tensor:
        """||g'||^2."""
        return self._along.square().sum((1, 2)) + self._beside

    def apart(self, scale: Tensor, observed_scale: Tensor) -> Tensor:
        """||scale g' - observed_scale g||^2 for factors (V,)."""
        along = scale[:, None, None] * self._along - observed_scale[:, None, None] * self.factors.core
        return along.square().sum((1, 2)) + scale.square() * self._beside

    @property
    def distance(self) -> Tensor:
        """||g' - g||^2."""
        return (self._along - self.factors.core).square().sum((1, 2)) + self._beside

    @property
    def absolute(self) -> Tensor:
        """Sum of |g' - g|, for which the gradient is formed."""
        seen = self.factors.left @ self.factors.core @ self.factors.right.mT
        return (self.deltas @ self.inputs.mT - seen).abs().sum((1, 2))

    @cached_property
    def _delta_parts(self) -> tuple[Tensor, Tensor]:
        """Coordinates (V, r, P) of the output gradients along ``left``, and the rest (V, O, P)."""
        return _parts(self.deltas, self.factors.left)

    @cached_property
    def _input_parts(self) -> tuple[Tensor, Tensor]:
        return _parts(self.inputs, self.factors.right)

    @cached_property
    def _along(self) -> Tensor:
        """(V, r, q) the gradient in the coordinates of the observed one."""
        return self._delta_parts[0] @ self._input_parts[0].mT

    @cached_property
    def _beside(self) -> Tensor:
        """(V,) squared norm of what of the gradient lies outside of these coordinates."""
        (along, rest), (input_along, input_rest) = self._delta_parts, self._input_parts
        input_rest_products = input_rest.mT @ input_rest
        input_products = input_along.mT @ input_along + input_rest_products
        return ((along.mT @ along) * input_rest_products + (rest.mT @ rest) * input_products).sum((1, 2))


def _parts(values: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``values`` (V, N, P): coordinates (V, r, P) along the orthonormal ``directions`` (V, N, r), and the rest."""
    along = directions.mT @ values
    return along, torch.baddbmm(values, directions, along, alpha=-1)
