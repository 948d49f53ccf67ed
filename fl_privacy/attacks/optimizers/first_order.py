"""Adam, AdamW, gradient descent and schedules of the learning rate; CMA-ES by the package cma."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fl_privacy.checks import number, whole
from fl_privacy.checks.packages import expect_package
from fl_privacy.errors import UserError

Schedule = Callable[[int, int], float]  # (iteration from 0, iterations in all) -> factor
Steps = int | Tensor  # number from 1, of all rows or (V,) of each


@dataclass(frozen=True)
class ConstantRate:
    """Schedule with a constant factor of 1."""

    def __call__(self, iteration: int, iterations: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class StepDecay:
    """Schedule that multiplies the rate by ``factor`` at 3/8, 5/8 and 7/8 of the iterations (Geiping et al. 2020)."""

    factor: float = 0.1

    def __call__(self, iteration: int, iterations: int) -> float:
        return float(self.factor ** sum(iteration >= int(iterations // divisor) for divisor in (2.667, 1.6, 1.142)))


@dataclass(frozen=True, kw_only=True)
class CosineRate:
    """Schedule with linear warm-up over ``warmup`` iterations, then half a cosine from 1 to 0."""

    warmup: int = 0

    def __call__(self, iteration: int, iterations: int) -> float:
        if iteration < self.warmup:
            return (iteration + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (iteration - self.warmup) / max(iterations - self.warmup, 1)))


@dataclass(frozen=True, kw_only=True)
class StairDecay:
    """Schedule that multiplies the rate by ``factor`` after each ``every`` iterations, as PyTorch's StepLR."""

    factor: float = 0.89
    every: int = 50

    def __call__(self, iteration: int, iterations: int) -> float:
        return float(self.factor ** (iteration // self.every))


Sign = Literal["none", "hard", "soft"]  # the pixels' gradient itself, its sign, or tanh(g s) / s, s from 1 to 0


def signed(gradient: Tensor, how: Sign, images: int, remaining: float) -> Tensor:
    """Return ``gradient`` (V, N) with its first ``images`` columns, the pixels, replaced by a sign or soft sign.

    ``remaining``: share of iterations that remain, the factor s in the soft sign tanh(g s) / s.
    """
    if how == "none":
        return gradient
    pixels = gradient[:, :images]
    taken = pixels.sign() if how == "hard" else (pixels * remaining).tanh() / remaining
    return taken if images == gradient.shape[1] else torch.cat([taken, gradient[:, images:]], 1)


@dataclass(frozen=True, kw_only=True)
class FirstOrder:
    """Settings of an optimizer whose steps use the gradient and its moments."""

    lr: float = 0.1
    sign: Sign = "none"
    schedule: Schedule = field(default_factory=ConstantRate)
    moments: ClassVar[int]  # values of state per variable

    def __post_init__(self) -> None:
        number("attack.lr", self.lr, above=0, example=0.1)

    def start(self, variables: Tensor, *, iterations: int, images: int) -> "FirstOrderRun":
        return FirstOrderRun(self, variables, iterations, images)

    def move(self, variables: Tensor, gradient: Tensor, moments: list[Tensor], steps: Steps, rate: float) -> Tensor:
        """Return variables (V, N) after step number ``steps`` at learning rate ``rate``; update ``moments``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Adam(FirstOrder):
    """Adam (torch.optim.Adam), or AdamW if ``weight_decay`` is above 0."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8  # number added to the root of the second moment
    weight_decay: float = 0.0
    clip: float = math.inf  # largest length of a victim's gradient
    moments: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"attack.betas is expected in [0, 1), but got {', '.join(map(str, self.betas))}; try 0.9.")
        number("attack.weight_decay", self.weight_decay, at_least=0, example=0)
        number("attack.clip", self.clip, above=0, infinite=True, example=1)

    def move(self, variables: Tensor, gradient: Tensor, moments: list[Tensor], steps: Steps, rate: float) -> Tensor:
        first, second = moments
        beta1, beta2 = self.betas
        if self.clip < math.inf:  # as torch.nn.utils.clip_grad_norm_ does
            lengths = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient = gradient * (self.clip / (lengths + 1e-6)).clamp_max(1)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        decayed = variables * (1 - rate * self.weight_decay) if self.weight_decay else variables
        if isinstance(steps, int):
            denominator = second.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(self.eps)
            return torch.addcdiv(decayed, first, denominator, value=-rate / (1 - beta1**steps))
        correction1, correction2 = (1 - beta1**steps)[:, None], (1 - beta2**steps)[:, None]
        denominator = second.sqrt().div_(correction2.sqrt()).add_(self.eps).mul_(correction1)
        return torch.addcdiv(decayed, first, denominator, value=-rate)


@dataclass(frozen=True, kw_only=True)
class GradientDescent(FirstOrder):
    """Gradient descent with momentum in [0, 1) (torch.optim.SGD)."""

    momentum: float = 0.9
    nesterov: bool = False
    moments: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        number("attack.momentum", self.momentum, at_least=0, below=1, example=0.9)

    def move(self, variables: Tensor, gradient: Tensor, moments: list[Tensor], steps: Steps, rate: float) -> Tensor:
        velocity = moments[0].mul_(self.momentum).add_(gradient)
        return variables - rate * (gradient + self.momentum * velocity if self.nesterov else velocity)


class FirstOrderRun:
    """State of a first-order optimization; rows are independent victims."""

    def __init__(self, settings: FirstOrder, variables: Tensor, iterations: int, images: int) -> None:
        self._settings, self._iterations, self._images, self._done = settings, iterations, images, 0
        self._moments = [torch.zeros_like(variables) for _ in range(settings.moments)]
        self._behind: Tensor | None = None  # (V,) steps forgotten, if any
        self._none = torch.zeros(len(variables), dtype=torch.bool, device=variables.device)

    @property
    def iteration(self) -> Tensor:
        return torch.full(self._none.shape, self._done, device=self._none.device)

    def step(self, variables: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move V victims' ``variables`` (V, N) by one step, given their loss (V,) and gradient (V, N).

        Return the next variables; a mask (V,) of victims at the end of an iteration, whose images may now be projected
        to valid values; and a mask (V,) of victims without further iterations.
        """
        if self._done >= self._iterations:
            return variables, ~self._none, ~self._none
        entering = signed(gradient, self._settings.sign, self._images, 1 - self._done / self._iterations)
        rate = self._settings.lr * self._settings.schedule(self._done, self._iterations)
        self._done += 1
        steps = self._done if self._behind is None else self._done - self._behind
        return self._settings.move(variables, entering, self._moments, steps, rate), ~self._none, self._none

    def restart(self, rows: Tensor) -> None:
        for moment in self._moments:
            moment[rows] = 0
        behind = torch.zeros(rows.shape, device=rows.device) if self._behind is None else self._behind
        self._behind = torch.where(rows, self._done, behind)

    def select(self, rows: Tensor) -> None:
        self._moments = [moment[rows] for moment in self._moments]
        self._none = self._none[rows]
        self._behind = None if self._behind is None else self._behind[rows]


@dataclass(frozen=True, kw_only=True)
class EvolutionStrategy:
    """Settings of CMA-ES (Hansen and Ostermeier 2001), started from N(0, deviation^2)."""

    population: int = 50  # candidates in each iteration, at least 4
    deviation: float = 1.0  # standard deviation of the first candidates; 1 suits the latents of a generator
    moments: ClassVar[int] = 0

    def __post_init__(self) -> None:
        whole("attack.population", self.population, at_least=4, example=50)
        number("attack.deviation", self.deviation, above=0, example=1)

    def expect_package(self) -> None:
        expect_package("cma", "attack.optimizer=cma")

    def begin(self, variables: int, iterations: int, generator: torch.Generator) -> Any:
        self.expect_package()
        import cma  # noqa: PLC0415

        def normal(*sizes: int) -> Any:
            return torch.randn(sizes, generator=generator, dtype=torch.float64).numpy()

        quiet = {"verbose": -9, "verb_log": 0}
        options = {"popsize": self.population, "maxiter": iterations, "randn": normal, "seed": float("nan"), **quiet}
        return cma.CMAEvolutionStrategy(variables * [0.0], self.deviation, options)
