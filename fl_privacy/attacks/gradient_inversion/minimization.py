"""Minimize for many victims at once, by descent or by evolution of candidates."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.settings import Projection
from fl_privacy.attacks.optimizers import EvolutionStrategy, Optimizer
from fl_privacy.models.gradients import differentiable_twice
from fl_privacy.types import Observation
from fl_privacy.types.film import Snapshot, TextFrame, frame, shots, show_frames

_HISTORY = 100


@dataclass(frozen=True, eq=False)
class Minimum:
    """The best variables (V, N) and loss (V,), and losses (T, V), thinned, and nan once a victim has finished.

    ``snapshots`` holds the best variables (N,) of filmed victims at some rows of the history.
    """

    variables: Tensor
    loss: Tensor
    history: Tensor
    snapshots: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)


class DescentState:
    """State of a descent, with finished victims until :meth:`select` removes them.

    Attributes:
        best: variables (V, N) with the lowest loss so far.
        rescued_at: (V,) best loss when a victim last went back to it.
        over: (V,) mask of the finished victims.
    """

    def __init__(self, variables: Tensor, iterations: int, filmed: Sequence[int] = ()) -> None:
        count = len(variables)
        self._iterations = iterations
        self._stride = max(1, iterations // _HISTORY)
        self.active = list(range(count))
        self.best = variables.clone()
        self.best_loss = torch.full((count,), torch.inf, dtype=variables.dtype, device=variables.device)
        self.rescued_at = torch.full_like(self.best_loss, torch.nan)
        self.over = torch.zeros(count, dtype=torch.bool, device=variables.device)
        self.any_broken = False
        self.share_done = 0.0
        self.snapped: list[int] = []
        history = variables.new_full((iterations // self._stride + 1, count), torch.nan)
        self._snapshots: dict[int, dict[int, Tensor]] = {victim: {} for victim in filmed}
        self._shots = shots(len(history)) if filmed else frozenset()
        self._found = Minimum(self.best.clone(), self.best_loss.clone(), history, self._snapshots)
        self._rows_over = [False] * count
        self._stretch = [0] * count
        self._due = list(range(count))

    def learn(self, variables: Tensor, loss: Tensor, broken: Tensor) -> None:
        self.any_broken = bool(broken.any())
        better = loss < self.best_loss
        if self.any_broken:
            better &= ~broken
        if any(self._rows_over):
            better &= ~self.over
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.best = torch.where(better[:, None], variables, self.best)
        self.snapped = []
        if self._due:
            values = loss.tolist()
            rows = [row for row in self._due if values[row] == values[row]]
            at, whose = [self._stretch[row] for row in rows], [self.active[row] for row in rows]
            self._found.history[at, whose] = loss[rows]
            for row, moment, victim in zip(rows, at, whose, strict=True):
                if moment in self._shots and victim in self._snapshots:
                    self._snapshots[victim][moment] = self.best[row].clone()
                    self.snapped.append(row)
            self._due = [row for row in self._due if values[row] != values[row]]

    def note(self, over: Tensor, iteration: Tensor) -> int:
        """Mark the victims ``over`` (V,), note the ``iteration`` (V,) of all, and count those left."""
        self.over = self.over | over
        self._rows_over = self.over.tolist()
        done = iteration.tolist()
        stretch = [at // self._stride for at in done]
        if stretch != self._stretch or len(self._due):
            due = {row for row, at in enumerate(stretch) if at != self._stretch[row]} | set(self._due)
            self._due = [row for row in sorted(due) if not self._rows_over[row]]
            self._stretch = stretch
        gone = sum(self._rows_over)
        work = sum(at for at, over in zip(done, self._rows_over, strict=True) if not over)
        count = self._found.history.shape[1]
        self.share_done = (count - len(done) + gone + work / self._iterations) / count
        return len(done) - gone

    def select(self, rows: Tensor) -> None:
        self._keep()
        kept = rows.tolist()
        self.active = [self.active[row] for row in kept]
        self.best, self.best_loss = self.best[rows], self.best_loss[rows]
        self.rescued_at, self.over = self.rescued_at[rows], self.over[rows]
        self._rows_over = [self._rows_over[row] for row in kept]
        self._stretch = [self._stretch[row] for row in kept]
        self._due = [number for number, row in enumerate(kept) if row in self._due]

    def minimum(self) -> Minimum:
        self._keep()
        return self._found

    def _keep(self) -> None:
        self._found.variables[self.active] = self.best
        self._found.loss[self.active] = self.best_loss


_NOTHING = 1e30
"""Loss of a candidate whose loss is not a number, so that the strategy can rank it."""

_HISTORY_OF_CMA = 100


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
    """Minimize ``problem`` by populations of candidates; see :func:`minimize`.

    Args:
        variables: (V, N), for shape, dtype and device alone: the populations start around 0.
        iterations: most populations of each victim.
    """
    count, size = variables.shape
    runs = [strategy.begin(size, iterations, generator) for generator in generators]
    best, best_loss = torch.zeros_like(variables), torch.full_like(variables[:, 0], torch.inf)
    stride = max(1, iterations // _HISTORY_OF_CMA)
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
    """Return the losses (A, P) of ``candidates`` (A, P, N) for ``victims``."""
    flat = candidates.flatten(0, 1)
    owners = torch.tensor(victims, device=flat.device).repeat_interleave(candidates.shape[1])
    losses = []
    for rows, some in zip(torch.split(owners, capacity), torch.split(flat, capacity), strict=True):
        with differentiable_twice():
            losses.append(problem.select(rows).loss(some).detach())
    return torch.cat(losses).reshape(candidates.shape[:2])


class Pictured(Protocol):
    """A problem whose variables (V, N) are images, or texts that can be decoded."""

    def images(self, variables: Tensor) -> Tensor:
        """Return the images (V, B, C, H, W), or texts (V, B, L, d + 1)."""
        ...


def filmed_rows(observations: Iterable[Observation]) -> list[int]:
    """List the rows to film."""
    return [row for row, o in enumerate(observations) if o.filmed]


@torch.no_grad()
def films_of(problem: Pictured, minimum: Minimum) -> dict[int, tuple[Snapshot, ...]]:
    """Return the snapshots of each filmed row and its final result, in order."""
    films = {}
    for row, snapshots in minimum.snapshots.items():
        number = minimum.history[:, row].isfinite().cumsum(0)
        moments = [*snapshots, len(number) - 1]
        rows = torch.full((len(moments),), row, device=minimum.variables.device)
        images = _of_rows(problem, rows).images(torch.stack([*snapshots.values(), minimum.variables[row]]))
        places = [max(0, int(number[moment]) - 1) for moment in moments]
        films[row] = tuple(_snapshot(problem, at, image) for at, image in zip(places, images, strict=True))
    return films


@torch.no_grad()
def frames_of(problem: Pictured, variables: Tensor, rows: Sequence[int]) -> list[Snapshot]:
    """Return frames of ``rows`` of the ``variables`` (V, N)."""
    chosen = torch.tensor(rows, device=variables.device)
    return [_snapshot(problem, 0, image) for image in _of_rows(problem, chosen).images(variables[chosen])]


def _snapshot(problem: Pictured, at: int, guess: Tensor) -> Snapshot:
    source = problem.settings.source if isinstance(problem, Problem) else None
    if isinstance(source, WordEmbeddings):
        return TextFrame(at, source.read(guess[:1])[0].cpu())
    return frame(at, guess)


def _of_rows(problem: Pictured, rows: Tensor) -> Pictured:
    """Select ``rows`` of what images depend on, without the large observed updates."""
    if not isinstance(problem, Problem):
        return problem
    labels, held = problem.labels, problem.held
    return replace(problem, labels=None if labels is None else labels[rows], held=None if held is None else held[rows])


_COMPACT_BELOW = 0.75


class Minimizable(Pictured, Protocol):
    """A loss of variables (V, N), the first of which are pixels."""

    @property
    def pixels(self) -> int: ...

    @property
    def attempts(self) -> int:
        """Return the number of neighboring rows that are attempts at the same victim."""
        ...

    def projected(self, variables: Tensor, how: Projection) -> Tensor: ...

    def select(self, rows: Tensor) -> Self: ...


P = TypeVar("P", bound=Minimizable)
P_contra = TypeVar("P_contra", contravariant=True)


class Moves(Protocol[P_contra]):
    """Moves of variables that no slope leads to."""

    def due(self, iteration: int) -> bool: ...

    def __call__(self, problem: P_contra, variables: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Return the variables (V, N) to go on from."""
        ...


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Settings of a descent.

    Attributes:
        noise: standard deviation of Gaussian noise added to the pixels' gradient.
        moves: moves of the variables (V, N) between iterations.
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

    A victim whose loss or gradient is not finite returns to its best iterate with a fresh optimizer; without progress
    since its last return it has finished. Finished victims leave the batch.

    Args:
        enough: loss (V,) below which a victim has finished.
        evaluate: (problem, variables) -> loss (V,) and gradient (V, N).
    """
    state = DescentState(variables, descent.iterations, filmed)
    run, rounds = descent.optimizer.start(variables, iterations=descent.iterations, images=problem.pixels), 0
    while True:
        loss, gradient = evaluate(problem, variables)
        broken = ~(loss + gradient.abs().amax(1)).isfinite()
        state.learn(variables, loss, broken)
        if state.snapped:
            show_frames(partial(frames_of, problem, state.best, state.snapped))
        if descent.noise:
            drawn = [torch.randn(problem.pixels, generator=generators[i]) for i in state.active]
            noisy = gradient[:, : problem.pixels] + descent.noise * torch.stack(drawn).to(gradient)
            gradient = torch.cat([noisy, gradient[:, problem.pixels :]], 1)
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
