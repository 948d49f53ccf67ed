"""Minimize losses of many victims at once, by descent or evolution strategy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.settings import Projection, Settings
from fl_privacy.attacks.optimizers import EvolutionStrategy
from fl_privacy.models.gradients import differentiable_twice
from fl_privacy.types import Observation
from fl_privacy.types.film import Snapshot, TextFrame, frame, shots, show_frames

_HISTORY = 100


@dataclass(frozen=True, eq=False)
class Minimum:
    """Result of a minimization: best variables (V, N) of V victims, their loss (V,), and the course of the losses.

    ``history`` (T, V): losses at T iterations, NaN after a victim's end. ``snapshots[victim][row]``: best variables
    (N,) at that row of ``history``, if the victim is recorded.
    """

    variables: Tensor
    loss: Tensor
    history: Tensor
    snapshots: Mapping[int, Mapping[int, Tensor]]


class DescentState:
    """State of V victims' descents; finished victims stay until :meth:`select` removes them.

    ``best`` (V, N): variables of least loss so far, to which a victim returns when its loss is not finite.
    ``rescued_at`` (V,): least loss when the victim last returned. ``over`` (V,): ``True`` for finished victims.
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
        """Mark victims ``over`` (V,) as finished, note each one's iteration, and return how many are unfinished."""
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
        self.minimum()
        kept = rows.tolist()
        self.active = [self.active[row] for row in kept]
        self.best, self.best_loss = self.best[rows], self.best_loss[rows]
        self.rescued_at, self.over = self.rescued_at[rows], self.over[rows]
        self._rows_over = [self._rows_over[row] for row in kept]
        self._stretch = [self._stretch[row] for row in kept]
        self._due = [number for number, row in enumerate(kept) if row in self._due]

    def minimum(self) -> Minimum:
        self._found.variables[self.active] = self.best
        self._found.loss[self.active] = self.best_loss
        return self._found


_NOTHING = 1e30  # loss of a candidate whose loss is not a number, so that the strategy can rank it


def search(
    problem: Problem,
    variables: Tensor,
    *,
    generators: Sequence[torch.Generator],
    enough: Tensor,
    settings: Settings,
    capacity: int,
    report: Report,
    filmed: Sequence[int] = (),
) -> Minimum:
    """Minimize ``problem`` by an evolution strategy, at most ``capacity`` guesses at a time; see :func:`minimize`."""
    assert isinstance(settings.optimizer, EvolutionStrategy)
    runs = [settings.optimizer.begin(variables.shape[1], settings.iterations, generator) for generator in generators]
    state = DescentState(torch.zeros_like(variables), settings.iterations, filmed)
    for iteration in range(1, settings.iterations + 1):
        asked = [torch.stack(list(map(torch.as_tensor, runs[victim].ask()))) for victim in state.active]
        active = torch.tensor(state.active, device=variables.device)
        losses = judged(problem, torch.stack(asked).to(variables), active, capacity, Problem.loss)
        for row, victim in enumerate(state.active):
            runs[victim].tell(list(asked[row].numpy()), losses[row].nan_to_num(_NOTHING, _NOTHING, _NOTHING).tolist())
        least, which = losses.nan_to_num(torch.inf, torch.inf).min(1)
        found = torch.stack([candidates[best] for candidates, best in zip(asked, which, strict=True)]).to(variables)
        state.learn(found, torch.minimum(least, state.best_loss), torch.zeros_like(state.over))
        ended = torch.tensor([bool(runs[victim].stop()) for victim in state.active], device=variables.device)
        over = (state.best_loss < enough[state.active]) | ended
        left = state.note(over, torch.full_like(which, iteration))
        report(state.share_done)
        if left == 0:
            break
        state.select((~over).nonzero().flatten())
    return state.minimum()


def judged(
    problem: Problem, candidates: Tensor, victims: Tensor, capacity: int, loss: Callable[[Problem, Tensor], Tensor]
) -> Tensor:
    """Return the loss (A, P) of P ``candidates`` (A, P, N) for A ``victims``; ``capacity``: most computed at once."""
    losses, owners = [], victims.repeat_interleave(candidates.shape[1])
    for rows, some in zip(*(torch.split(each, capacity) for each in (owners, candidates.flatten(0, 1))), strict=True):
        with differentiable_twice():
            losses.append(loss(problem.select(rows), some).detach())
    return torch.cat(losses).reshape(candidates.shape[:2])


class Minimizable(Protocol):
    """A minimization problem with N variables in each of V rows; ``attempts`` consecutive rows belong to one victim.

    The first ``pixels`` columns are images or embeddings of texts.
    """

    @property
    def pixels(self) -> int: ...

    @property
    def attempts(self) -> int: ...

    def images(self, variables: Tensor) -> Tensor:
        """Return images (V, B, C, H, W), or texts (V, B, L, d + 1): embeddings, then 1 for a word, 0 after the end."""
        ...

    def projected(self, variables: Tensor, how: Projection) -> Tensor: ...

    def select(self, rows: Tensor) -> Self: ...


def filmed_rows(observations: Iterable[Observation]) -> list[int]:
    """Return the indices of the observations whose reconstruction is to be recorded step by step."""
    return [row for row, o in enumerate(observations) if o.filmed]


@torch.no_grad()
def films_of(problem: Minimizable, minimum: Minimum) -> dict[int, tuple[Snapshot, ...]]:
    """Return each recorded victim's guesses in the order of iterations, the final one last."""
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
def frames_of(problem: Minimizable, variables: Tensor, rows: Sequence[int]) -> list[Snapshot]:
    """Return a snapshot, image or text, of the guess in each of the given ``rows`` of ``variables`` (V, N)."""
    chosen = torch.tensor(rows, device=variables.device)
    return [_snapshot(problem, 0, image) for image in _of_rows(problem, chosen).images(variables[chosen])]


def _snapshot(problem: Minimizable, at: int, guess: Tensor) -> Snapshot:
    source = problem.settings.source if isinstance(problem, Problem) else None
    if isinstance(source, WordEmbeddings):
        return TextFrame(at, source.read(guess[:1])[0].cpu())
    return frame(at, guess)


def _of_rows(problem: Minimizable, rows: Tensor) -> Minimizable:
    if not isinstance(problem, Problem):
        return problem
    labels, held = problem.labels, problem.held
    return replace(problem, labels=None if labels is None else labels[rows], held=None if held is None else held[rows])


_COMPACT_BELOW = 0.75


P = TypeVar("P", bound=Minimizable)


def minimize(
    problem: P,
    variables: Tensor,
    *,
    generators: Sequence[torch.Generator],
    enough: Tensor,
    settings: Settings,
    evaluate: Callable[[P, Tensor], tuple[Tensor, Tensor]],
    report: Report,
    filmed: Sequence[int] = (),
    moves: Callable[[int, P, Tensor, Sequence[torch.Generator]], Tensor] | None = None,
) -> Minimum:
    """Minimize ``problem`` from ``variables`` (V, N), N for each of V victims.

    A victim with a loss or gradient that is not finite returns to its best iterate with a fresh optimizer; if it has
    made no progress since the last such return, it is finished.

    Args:
        enough: loss (V,) below which a victim is finished.
        evaluate: (problem, variables) -> loss (V,) and gradient (V, N).
        filmed: victims whose best iterates are recorded on the way.
        moves: function after each iteration that may change variables, such as the order of words: (iterations so far,
            problem, variables, generators) -> variables.
    """
    assert not isinstance(settings.optimizer, EvolutionStrategy)
    state = DescentState(variables, settings.iterations, filmed)
    run, rounds = settings.optimizer.start(variables, iterations=settings.iterations, images=problem.pixels), 0
    while True:
        loss, gradient = evaluate(problem, variables)
        broken = ~(loss + gradient.abs().amax(1)).isfinite()
        state.learn(variables, loss, broken)
        if state.snapped:
            show_frames(partial(frames_of, problem, state.best, state.snapped))
        if settings.noise:
            drawn = [torch.randn(problem.pixels, generator=generators[i]) for i in state.active]
            noisy = gradient[:, : problem.pixels] + settings.noise * torch.stack(drawn).to(gradient)
            gradient = torch.cat([noisy, gradient[:, problem.pixels :]], 1)
        moved, ended, finished = run.step(variables, loss, gradient)
        if settings.projection != "none":
            moved = torch.where((ended & ~finished)[:, None], problem.projected(moved, settings.projection), moved)
        over = finished | (loss < enough)
        if state.any_broken:
            hopeless = broken & ((state.rescued_at == state.best_loss) | state.best_loss.isinf())
            moved = torch.where(broken[:, None], state.best, moved)
            state.rescued_at = torch.where(broken, state.best_loss, state.rescued_at)
            run.restart(broken)
            over = (finished & ~broken) | hopeless | (loss < enough)
        variables = moved
        rounds += 1
        if moves is not None:
            variables = moves(rounds, problem, variables, [generators[i] for i in state.active])
        left = state.note(over, run.iteration)
        report(state.share_done)
        if left == 0:
            return state.minimum()
        if left <= _COMPACT_BELOW * len(state.active) and problem.attempts == 1:
            keep = (~state.over).nonzero().flatten()
            run.select(keep)
            state.select(keep)
            problem, variables, enough = problem.select(keep), variables[keep], enough[keep]
