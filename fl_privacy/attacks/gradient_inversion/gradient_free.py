"""The loop without gradients: many victims, each with its own population, all candidates judged together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.standings import Minimum
from fl_privacy.attacks.optimizers import EvolutionStrategy
from fl_privacy.film import shots
from fl_privacy.gradients import differentiable_twice

_NOTHING = 1e30
"""What a candidate is worth whose loss is no number: the strategy ranks them all."""

_HISTORY = 100


def search(
    problem: Problem,
    variables: Tensor,
    *,
    generators: Sequence[torch.Generator],
    enough: Tensor,
    strategy: EvolutionStrategy,
    iterations: int,
    capacity: int,
    report: Report,
    filmed: Sequence[int] = (),
) -> Minimum:
    """Minimize ``problem`` for V victims by populations of candidates.

    Args:
        problem: of the victims.
        variables: (V, N), of which the shape, dtype and device count: the populations start around 0.
        generators: the random stream of each victim.
        enough: (V,) a victim whose loss is below has finished.
        strategy: settings.
        iterations: populations of each victim, at most.
        capacity: candidates judged at a time.
        report: called with the share of the work that is done.
        filmed: victims of which snapshots are kept on the way.
    """
    count, size = variables.shape
    runs = [strategy.begin(size, iterations, generator) for generator in generators]
    best, best_loss = torch.zeros_like(variables), torch.full_like(variables[:, 0], torch.inf)
    stride = max(1, iterations // _HISTORY)
    history = torch.full((iterations // stride + 1, count), torch.nan, dtype=variables.dtype, device=variables.device)
    snapshots: dict[int, dict[int, Tensor]] = {victim: {} for victim in filmed}
    moments = shots(len(history))
    active = list(range(count))
    for iteration in range(iterations):
        asked = [runs[victim].ask() for victim in active]
        losses = _judged(problem, torch.stack(asked).to(variables), active, capacity)
        for row, victim in enumerate(active):
            runs[victim].tell(asked[row], losses[row].nan_to_num(_NOTHING, _NOTHING, _NOTHING).tolist())
        rows = torch.tensor(active, device=variables.device)
        least, which = losses.nan_to_num(torch.inf, torch.inf).min(1)
        if iteration % stride == 0:
            history[iteration // stride, rows] = torch.minimum(least, best_loss[rows])
        found = torch.stack([asked[row][which[row]] for row in range(len(active))]).to(variables)
        better = least < best_loss[rows]
        best[rows] = torch.where(better[:, None], found, best[rows])
        best_loss[rows] = torch.minimum(least, best_loss[rows])
        if iteration % stride == 0 and iteration // stride in moments:
            for victim in snapshots.keys() & set(active):
                snapshots[victim][iteration // stride] = best[victim].clone()
        over = (best_loss < enough).tolist()
        active = [victim for victim in active if not (over[victim] or runs[victim].ended)]
        report(1 - len(active) / count * (1 - (iteration + 1) / iterations))
        if not active:
            break
    return Minimum(best, best_loss, history, snapshots)


def _judged(problem: Problem, candidates: Tensor, victims: Sequence[int], capacity: int) -> Tensor:
    """(A, P) the losses of ``candidates`` (A, P, N) for as many of the problem's victims."""
    flat = candidates.flatten(0, 1)
    owners = torch.tensor(victims, device=flat.device).repeat_interleave(candidates.shape[1])
    losses = []
    for rows, some in zip(torch.split(owners, capacity), torch.split(flat, capacity), strict=True):
        with differentiable_twice():
            losses.append(problem.select(rows).loss(some).detach())
    return torch.cat(losses).reshape(candidates.shape[:2])
