"""The loop: many victims, each with its own loss, optimizer state, best iterate and end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.gradient_inversion.initialization import Projection
from fl_privacy.attacks.optimizers import Optimizer

_HISTORY = 100
_COMPACT_BELOW = 0.75


class Minimizable(Protocol):
    """A loss of the variables (V, N) of V victims, of which the first are pixels."""

    @property
    def pixels(self) -> int:
        """How many of the variables are pixels."""
        ...

    @property
    def attempts(self) -> int:
        """So many neighboring victims are attempts at the same one."""
        ...

    def projected(self, variables: Tensor, how: Projection) -> Tensor:
        """The variables with their images brought to [0, 1]."""
        ...

    def select(self, rows: Tensor) -> Self:
        """Of the victims ``rows``."""
        ...


P = TypeVar("P", bound=Minimizable)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How a problem is minimized.

    Attributes:
        optimizer: settings.
        iterations: of the optimizer.
        projection: after each iteration.
        noise: standard deviation of Gaussian noise added to the pixels' gradient.
    """

    optimizer: Optimizer
    iterations: int
    projection: Projection
    noise: float


@dataclass(frozen=True, eq=False)
class Minimum:
    """The best of each victim: variables (V, N), loss (V,) and losses (T, V), thinned and nan once it had finished."""

    variables: Tensor
    loss: Tensor
    history: Tensor


def minimize(
    problem: P,
    variables: Tensor,
    *,
    generators: Sequence[torch.Generator],
    enough: Tensor,
    descent: Descent,
    evaluate: Callable[[P, Tensor], tuple[Tensor, Tensor]],
    report: Report,
) -> Minimum:
    """Minimize ``problem`` from ``variables`` (V, N).

    A victim whose loss or gradient is not finite goes back to its best iterate with a fresh optimizer; if it has
    found nothing better since the last time, it has finished. Finished victims leave the batch.

    Args:
        generators: the random stream of each victim.
        enough: (V,) a victim whose loss is below has finished.
        descent: how to minimize.
        evaluate: (problem, variables) -> loss (V,) and gradient (V, N).
        report: called with the share of the work that is done.
    """
    count = len(variables)
    best, best_loss = variables.clone(), torch.full((count,), torch.inf, dtype=variables.dtype, device=variables.device)
    rescued_at = torch.full_like(best_loss, torch.nan)
    active = torch.arange(count, device=variables.device)
    over = torch.zeros(count, dtype=torch.bool, device=variables.device)
    run = descent.optimizer.start(variables, iterations=descent.iterations, images=problem.pixels)
    stride = max(1, descent.iterations // _HISTORY)
    history = variables.new_full((descent.iterations // stride + 1, count), torch.nan)
    while len(active):
        loss, gradient = evaluate(problem, variables)
        broken = ~(loss.isfinite() & gradient.isfinite().all(1))
        better = (loss < best_loss[active]) & ~broken & ~over
        best_loss[active] = torch.where(better, loss, best_loss[active])
        best[active] = torch.where(better[:, None], variables, best[active])
        now = run.iteration // stride
        recorded = history[now, active]
        history[now, active] = torch.where(recorded.isnan() & ~over, loss, recorded)
        gradient = _noisy(gradient, problem.pixels, descent.noise, [generators[i] for i in active.tolist()])
        variables, ended, finished = run.step(variables, loss, gradient)
        if descent.projection != "none":
            variables = torch.where(
                (ended & ~finished)[:, None], problem.projected(variables, descent.projection), variables
            )
        hopeless = broken & ((rescued_at[active] == best_loss[active]) | best_loss[active].isinf())
        if broken.any():
            variables = torch.where(broken[:, None], best[active], variables)
            rescued_at[active] = torch.where(broken, best_loss[active], rescued_at[active])
            run.restart(broken)
        over |= (finished & ~broken) | hopeless | (loss < enough[active])
        left = int((~over).sum())
        report(_share_done(run.iteration, over, count, descent.iterations))
        if left == 0:
            break
        if left <= _COMPACT_BELOW * len(active) and problem.attempts == 1:
            keep = (~over).nonzero().flatten()
            run.select(keep)
            problem, active, variables, over = problem.select(keep), active[keep], variables[keep], over[keep]
    return Minimum(best, best_loss, history)


def _noisy(gradient: Tensor, pixels: int, std: float, generators: Sequence[torch.Generator]) -> Tensor:
    if std == 0:
        return gradient
    noise = torch.stack([torch.randn(pixels, generator=g) for g in generators]).to(gradient)
    return torch.cat([gradient[:, :pixels] + std * noise, gradient[:, pixels:]], 1)


def _share_done(iteration: Tensor, over: Tensor, count: int, iterations: int) -> float:
    gone = count - len(over)
    return (gone + float(torch.where(over, 1, iteration / iterations).sum())) / count
