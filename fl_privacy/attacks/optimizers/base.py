"""What an optimizer of V independent victims is."""

import math
from typing import Protocol

from torch import Tensor

from fl_privacy.errors import UserError


class OptimizerRun(Protocol):
    """An optimization under way. Rows are victims and never mix.

    Attributes:
        iteration: (V,) iterations finished.
    """

    @property
    def iteration(self) -> Tensor: ...

    def step(self, variables: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move ``variables`` by one step.

        Args:
            variables: (V, N).
            loss: (V,) at ``variables``.
            gradient: (V, N) at ``variables``.

        Returns:
            The next variables (V, N); ``ended`` (V,), where an iteration ended, so that a projection is due;
            ``finished`` (V,), where there is nothing more to do (those rows were not moved).
        """
        ...

    def restart(self, rows: Tensor) -> None:
        """Forget what was learned about the victims ``rows`` (V,) bool, which were put somewhere else."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep only the victims ``rows`` (indices)."""
        ...


class Optimizer(Protocol):
    """What starts an optimization; it holds settings alone, so that one serves any number of victims."""

    def start(self, variables: Tensor, *, iterations: int, images: int) -> OptimizerRun:
        """Start an optimization from ``variables``.

        Args:
            variables: (V, N).
            iterations: how many.
            images: number of the N variables that are pixels, the first ones; the others are label logits.
        """
        ...

    @property
    def moments(self) -> int:
        """Return the values of state per variable."""
        ...


def expect_rate(name: str, value: float) -> None:
    """Raise ``UserError`` unless ``value`` is a learning rate: above 0 and finite."""
    if not 0 < value < math.inf:
        raise UserError(f"{name} is expected to be above 0 and finite, but got {value}; try 0.1.")


def expect_share(name: str, *values: float) -> None:
    """Raise ``UserError`` unless all ``values`` are in [0, 1)."""
    if not all(0 <= value < 1 for value in values):
        raise UserError(f"{name} is expected in [0, 1), but got {', '.join(map(str, values))}; try 0.9.")
