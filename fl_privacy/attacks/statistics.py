"""The few numbers per layer and victim that every objective is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Target:
    """The observed tensor of one layer for V victims.

    Attributes:
        value: (V, n) flattened, (V, 0) where it is known by its factors.
        squared: (V,) sum of squares.
        variance: (V,) over the n elements.
        size: n.
    """

    value: Tensor
    squared: Tensor
    variance: Tensor
    size: int

    @classmethod
    def of(cls, value: Tensor) -> "Target":
        """From (V, *shape)."""
        flat = value.flatten(1)
        return cls(flat, flat.square().sum(1), flat.var(1, correction=0), flat.shape[1])

    def without_value(self) -> "Target":
        """The numbers alone."""
        return Target(self.value[:, :0].clone(), self.squared, self.variance, self.size)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Target":
        """With its tensors changed."""
        return Target(change(self.value), change(self.squared), change(self.variance), self.size)


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
    """Statistics of a gradient (V, *shape) that was formed."""

    gradient: Tensor
    target: Target

    @property
    def dot(self) -> Tensor:
        """<g', g>."""
        return (self.gradient.flatten(1) * self.target.value).sum(1)

    @property
    def squared(self) -> Tensor:
        """||g'||^2."""
        return self.gradient.flatten(1).square().sum(1)

    @property
    def distance(self) -> Tensor:
        """||g' - g||^2."""
        return (self.gradient.flatten(1) - self.target.value).square().sum(1)

    @property
    def absolute(self) -> Tensor:
        """Sum of |g' - g|."""
        return (self.gradient.flatten(1) - self.target.value).abs().sum(1)
