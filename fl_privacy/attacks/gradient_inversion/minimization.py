"""The loop: many victims, each with its own loss, optimizer state, best iterate and end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.gradient_inversion.filming import Pictured, frames_of
from fl_privacy.attacks.gradient_inversion.initialization import Projection
from fl_privacy.attacks.gradient_inversion.standings import Minimum, Standing
from fl_privacy.attacks.optimizers import Optimizer
from fl_privacy.film import show_frames

_COMPACT_BELOW = 0.75


class Minimizable(Pictured, Protocol):
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
P_contra = TypeVar("P_contra", contravariant=True)


class Moves(Protocol[P_contra]):
    """Moves of variables that no slope leads to."""

    def due(self, iteration: int) -> bool:
        """Whether there is one behind so many iterations."""
        ...

    def __call__(self, problem: P_contra, variables: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """The variables (V, N) to go on from."""
        ...


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How a problem is minimized.

    Attributes:
        optimizer: settings.
        iterations: of the optimizer.
        projection: after each iteration.
        noise: standard deviation of Gaussian noise added to the pixels' gradient.
        moves: what is done to the variables (V, N) of a problem, with the random stream of each victim, when so many
            iterations are over; ``None``: nothing.
    """

    optimizer: Optimizer
    iterations: int
    projection: Projection
    noise: float
    moves: Moves[Any] | None = None


def minimize(
    problem: P,
    variables: Tensor,
    *,
    generators: Sequence[torch.Generator],
    enough: Tensor,
    descent: Descent,
    evaluate: Callable[[P, Tensor], tuple[Tensor, Tensor]],
    report: Report,
    filmed: Sequence[int] = (),
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
        filmed: victims of which snapshots are kept on the way.
    """
    state = Standing(variables, descent.iterations, filmed)
    run, rounds = descent.optimizer.start(variables, iterations=descent.iterations, images=problem.pixels), 0
    while True:
        loss, gradient = evaluate(problem, variables)
        broken = ~(loss + gradient.abs().amax(1)).isfinite()
        state.learn(variables, loss, broken)
        if state.snapped:
            show_frames(partial(frames_of, problem, state.best, state.snapped))
        if descent.noise:
            gradient = _noisy(gradient, problem.pixels, descent.noise, [generators[i] for i in state.active])
        moved, ended, finished = run.step(variables, loss, gradient)
        if descent.projection != "none":
            due = (ended & ~finished)[:, None]
            moved = torch.where(due, problem.projected(moved, descent.projection), moved)
        over = finished | (loss < enough)
        if state.any_broken:
            hopeless = broken & ((state.rescued_at == state.best_loss) | state.best_loss.isinf())
            moved = torch.where(broken[:, None], state.best, moved)
            state.rescued_at = torch.where(broken, state.best_loss, state.rescued_at)
            run.restart(broken)
            over = (finished & ~broken) | hopeless | (loss < enough)
        variables = moved
        rounds += 1
        if descent.moves is not None and descent.moves.due(rounds):
            variables = descent.moves(problem, variables, [generators[i] for i in state.active])
        left = state.note(over, run.iteration)
        report(state.share_done)
        if left == 0:
            return state.minimum()
        if left <= _COMPACT_BELOW * len(state.active) and problem.attempts == 1:
            keep = (~state.over).nonzero().flatten()
            run.select(keep)
            state.select(keep)
            problem, variables, enough = problem.select(keep), variables[keep], enough[keep]


def _noisy(gradient: Tensor, pixels: int, std: float, generators: Sequence[torch.Generator]) -> Tensor:
    noise = torch.stack([torch.randn(pixels, generator=g) for g in generators]).to(gradient)
    return torch.cat([gradient[:, :pixels] + std * noise, gradient[:, pixels:]], 1)
