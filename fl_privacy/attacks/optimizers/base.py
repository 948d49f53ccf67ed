"""The interface of optimizers of V independent victims."""

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
        """Move ``variables`` (V, N) by one step, given their loss (V,) and gradient (V, N).

        Returns:
            The next variables (V, N); ``ended`` (V,), rows with a finished iteration, due for projection; ``finished``
                (V,), rows with nothing more to do, which stay.
        """
        ...

    def restart(self, rows: Tensor) -> None: ...

    def select(self, rows: Tensor) -> None: ...


class Optimizer(Protocol):
    """Settings that start an optimization of any number of victims."""

    def start(self, variables: Tensor, *, iterations: int, images: int) -> OptimizerRun:
        """Start from ``variables`` (V, N); the first ``images`` of N are pixels, the others label logits."""
        ...

    @property
    def moments(self) -> int:
        """Return the state's values per variable."""
        ...


def expect_rate(name: str, value: float) -> None:
    """Raise ``UserError`` unless ``value`` is a learning rate, above 0 and finite."""
    if not 0 < value < math.inf:
        raise UserError(f"{name} is expected to be above 0 and finite, but got {value}; try 0.1.")


def expect_share(name: str, *values: float) -> None:
    """Raise ``UserError`` unless all ``values`` are in [0, 1)."""
    if not all(0 <= value < 1 for value in values):
        raise UserError(f"{name} is expected in [0, 1), but got {', '.join(map(str, values))}; try 0.9.")
