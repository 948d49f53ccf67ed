"""What an optimizer of V independent victims is."""

from typing import Protocol

from torch import Tensor


class OptimizerRun(Protocol):
    """An optimization under way. Rows are victims and never mix.

    Attributes:
        iteration: (V,) iterations finished.
    """

    @property
    def iteration(self) -> Tensor:
        """As above."""
        ...

    def step(self, variables: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One move.

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
    """Settings of an optimizer."""

    def start(self, variables: Tensor, *, iterations: int, images: int) -> OptimizerRun:
        """Begin.

        Args:
            variables: (V, N).
            iterations: how many.
            images: the first so many of the N variables are pixels, the others label logits.
        """
        ...

    @property
    def moments(self) -> int:
        """Values of state per variable."""
        ...
