"""The few numbers per layer and victim that every objective is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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
        flat = value.flatten(1)
        low, high = (None, None) if bounds is None else (bound.flatten(1) for bound in bounds)
        return cls(flat, flat.square().sum(1), flat.var(1, correction=0), flat.shape[1], low, high)

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
    def dot(self) -> Tensor:
        """<g', g>."""
        ...

    @property
    def squared(self) -> Tensor:
        """||g'||^2."""
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
    def dot(self) -> Tensor:
        """<g', g>."""
        return (self._guess * self.target.value).sum(1)

    @property
    def squared(self) -> Tensor:
        """||g'||^2."""
        return self._guess.square().sum(1)

    @property
    def distance(self) -> Tensor:
        """||g' - g||^2."""
        return self._difference.square().sum(1)

    @property
    def absolute(self) -> Tensor:
        """Sum of |g' - g|."""
        return self._difference.abs().sum(1)

    @property
    def _guess(self) -> Tensor:
        return self.gradient.flatten(1) if self.target.low is None else self.target.value + self._difference

    @property
    def _difference(self) -> Tensor:
        """What separates the guess from the observed value, or from the nearest one within the bounds."""
        flat, target = self.gradient.flatten(1), self.target
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
