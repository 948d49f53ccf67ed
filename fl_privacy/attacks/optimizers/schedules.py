"""Factors on the learning rate over an attack's iterations."""

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """(iteration from 0, iterations in all) -> factor."""

    def __call__(self, iteration: int, iterations: int) -> float: ...


@dataclass(frozen=True)
class ConstantRate:
    """Always 1."""

    def __call__(self, iteration: int, iterations: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class StepDecay:
    """Times ``factor`` at 3/8, 5/8 and 7/8 of the iterations (Geiping et al. 2020)."""

    factor: float = 0.1

    def __call__(self, iteration: int, iterations: int) -> float:
        passed = sum(iteration >= int(iterations // divisor) for divisor in (2.667, 1.6, 1.142))
        return float(self.factor**passed)


@dataclass(frozen=True, kw_only=True)
class CosineRate:
    """Linear warm-up, then half a cosine from 1 to 0.

    Attributes:
        warmup: iterations.
    """

    warmup: int = 0

    def __call__(self, iteration: int, iterations: int) -> float:
        if iteration < self.warmup:
            return (iteration + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (iteration - self.warmup) / max(iterations - self.warmup, 1)))


@dataclass(frozen=True, kw_only=True)
class StairDecay:
    """Times ``factor`` after every ``every`` iterations (torch.optim.lr_scheduler.StepLR)."""

    factor: float = 0.89
    every: int = 50

    def __call__(self, iteration: int, iterations: int) -> float:
        return float(self.factor ** (iteration // self.every))
