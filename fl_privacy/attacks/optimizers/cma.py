"""CMA-ES by the package cma: a search without gradients."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fl_privacy.checks import number, whole
from fl_privacy.checks.packages import expect_package


@dataclass(frozen=True, kw_only=True)
class EvolutionStrategy:
    """Covariance matrix adaptation (Hansen and Ostermeier 2001), from N(0, deviation^2).

    Attributes:
        population: candidates in each iteration, at least 4.
        deviation: standard deviation of the first ones; 1 suits the latents of a generator.
    """

    population: int = 50
    deviation: float = 1.0
    moments: ClassVar[int] = 0

    def __post_init__(self) -> None:
        whole("attack.population", self.population, at_least=4, example=50)
        number("attack.deviation", self.deviation, above=0, example=1)

    def expect_package(self) -> None:
        """Raise ``UserError`` unless the package cma is installed."""
        expect_package("cma", "attack.optimizer=cma")

    def begin(self, variables: int, iterations: int, generator: torch.Generator) -> Any:
        """Begin the ``cma.CMAEvolutionStrategy`` of one victim; ``generator`` is on the CPU."""
        self.expect_package()
        import cma  # noqa: PLC0415

        def normal(*sizes: int) -> Any:
            return torch.randn(sizes, generator=generator, dtype=torch.float64).numpy()

        quiet = {"verbose": -9, "verb_log": 0}
        options = {"popsize": self.population, "maxiter": iterations, "randn": normal, "seed": float("nan"), **quiet}
        return cma.CMAEvolutionStrategy(variables * [0.0], self.deviation, options)
