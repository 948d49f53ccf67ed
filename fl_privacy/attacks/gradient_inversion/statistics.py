"""The few numbers per layer and victim that every objective is made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.closed_forms import squared_distance
from fl_privacy.gradients.low_rank import Factors


@dataclass(frozen=True, eq=False)
class Target:
    """The observed tensor of one layer for V victims.

    Attributes:
        value: (V, n) flattened, (V, 0) where it is known by its factors.
        squared: (V,) sum of squares.
        variance: (V,) over the n elements.
        size: n.
        low, high: (V, n) between which the undefended tensor is known to be, where the defense hid its exact value;
            ``None`` where it is the one observed. A guess within is as good as the observed value.
    """

    value: Tensor
    squared: Tensor
    variance: Tensor
    size: int
    low: Tensor | None = None
    high: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor, bounds: tuple[Tensor, Tensor] | None = None) -> "Target":
        """From (V, *shape), with ``bounds`` of that shape."""
        flat = value.reshape(len(value), -1)
        low, high = (None, None) if bounds is None else (bound.reshape(len(bound), -1) for bound in bounds)
        return cls(flat, flat.square().sum(1), flat.var(1, correction=0), flat.shape[1], low, high)

    @classmethod
    def joined(cls, targets: Sequence["Target"]) -> "Target":
        """Those without bounds as one, in their order."""
        return cls.of(torch.cat([target.value for target in targets], 1))

    def without_value(self) -> "Target":
        """The numbers alone."""
        return Target(self.value[:, :0].clone(), self.squared, self.variance, self.size)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Target":
        """With its tensors changed."""
        low, high = (None if bound is None else change(bound) for bound in (self.low, self.high))
        return Target(change(self.value), change(self.squared), change(self.variance), self.size, low, high)


class LayerStatistics(Protocol):
    """Guessed against observed gradient of one tensor; each number is (V,) and computed when asked for."""

    @property
    def target(self) -> Target:
        """The observed tensor."""
        ...

    @property
    def guess(self) -> Tensor | None:
        """g' (V, n), where it was formed and may be anything; ``None`` otherwise."""
        ...

    @property
    def squared(self) -> Tensor:
        """||g'||^2."""
        ...

    def apart(self, scale: Tensor, observed_scale: Tensor) -> Tensor:
        """||scale g' - observed_scale g||^2 for factors (V,), to the accuracy of a sum of squared differences."""
        ...

    @property
    def distance(self) -> Tensor:
        """||g' - g||^2."""
        ...

    @property
    def absolute(self) -> Tensor:
        """Sum of |g' - g|."""
        ...


@dataclass(frozen=True, eq=False)
class Explicit:
    """Statistics of a gradient (V, *shape) that was formed; where the target has bounds, of g' moved by g - [g']."""

    gradient: Tensor
    target: Target

    @property
    def guess(self) -> Tensor | None:
        return self.gradient.reshape(len(self.gradient), -1) if self.target.low is None else None

    @property
    def squared(self) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(self._guess, dim=1)
        return lengths.square()

    def apart(self, scale: Tensor, observed_scale: Tensor) -> Tensor:
        """||scale g' - observed_scale g||^2 for factors (V,)."""
        return torch.addcmul(-observed_scale[:, None] * self.target.value, self._guess, scale[:, None]).square().sum(1)

    @property
    def distance(self) -> Tensor:
        if self.target.low is None:
            return squared_distance(self.gradient.reshape(len(self.gradient), -1), self.target.value)
        return self._difference.square().sum(1)

    @property
    def absolute(self) -> Tensor:
        return self._difference.abs().sum(1)

    @property
    def _guess(self) -> Tensor:
        return (
            self.gradient.reshape(len(self.gradient), -1)
            if self.target.low is None
            else self.target.value + self._difference
        )

    @property
    def _difference(self) -> Tensor:
        """What separates the guess from the observed value, or from the nearest one within the bounds."""
        flat, target = self.gradient.reshape(len(self.gradient), -1), self.target
        return flat - (target.value if target.low is None else flat.clamp(target.low, target.high))


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
    guess: None = None

    @property
    def squared(self) -> Tensor:
        return self._along.square().sum((1, 2)) + self._beside

    def apart(self, scale: Tensor, observed_scale: Tensor) -> Tensor:
        """||scale g' - observed_scale g||^2 for factors (V,)."""
        along = scale[:, None, None] * self._along - observed_scale[:, None, None] * self.factors.core
        return along.square().sum((1, 2)) + scale.square() * self._beside

    @property
    def distance(self) -> Tensor:
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
