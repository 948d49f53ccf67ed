"""From the first variables to images: by descent or by search, in one stage or in those of a source of images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report
from fl_privacy.attacks.gradient_inversion.filming import films_of
from fl_privacy.attacks.gradient_inversion.gradient_free import search
from fl_privacy.attacks.gradient_inversion.minimization import Descent, minimize
from fl_privacy.attacks.gradient_inversion.preparation import Prepared
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.standings import Minimum
from fl_privacy.attacks.optimizers import EvolutionStrategy
from fl_privacy.film import Snapshot, joined


@dataclass(frozen=True, eq=False)
class Found:
    """What was made of V victims.

    Attributes:
        images: (V, B, C, H, W).
        labels: (V, B) or probabilities (V, B, K).
        loss: (V,).
        history: (T, V) losses, thinned and nan once a victim had finished.
        films: of the victims that were filmed.
    """

    images: Tensor
    labels: Tensor
    loss: Tensor
    history: Tensor
    films: Mapping[int, tuple[Snapshot, ...]] = field(default_factory=dict)

    def or_better(self, other: "Found") -> "Found":
        """Of each victim what has the lower loss, of two that went one after the other."""
        rows = other.loss < self.loss
        labels = torch.where(rows.view(-1, *[1] * (self.labels.dim() - 1)), other.labels, self.labels)
        return Found(
            images=torch.where(rows.view(-1, 1, 1, 1, 1), other.images, self.images),
            labels=labels,
            loss=torch.minimum(other.loss, self.loss),
            history=torch.cat([self.history, other.history]),
            films={
                row: joined(film, int(self.history[:, row].isfinite().sum()), other.films[row])
                for row, film in self.films.items()
            },
        )


def minimize_in_stages(
    prepared: Prepared,
    problem: Problem,
    variables: Tensor,
    generators: Sequence[torch.Generator],
    report: Report,
    *,
    filmed: Sequence[int] = (),
) -> Found:
    """Minimize ``problem`` from ``variables`` (V, N).

    Pixels have one stage. A generator may have several, each from what the one before it found; of each victim the one
    is taken whose images fit the update best, by the loss without the penalty on latents, which the first alone has.
    The victims ``filmed`` are filmed.
    """
    source = prepared.settings.source
    stages, best = 1 if source is None else source.stages, None
    for number in range(stages):

        def meter(share: float, before: int = number) -> None:
            report((before + share) / stages)

        minimum = _minimum(prepared, problem, variables, generators, meter, filmed=filmed)
        found = _with_images(problem, minimum)
        if source is None or problem.held is None or stages == 1:
            return found
        own, rest = minimum.variables[:, : problem.pixels], minimum.variables[:, problem.pixels :]
        found = replace(found, loss=minimum.loss - source.penalty(own, problem.shape))
        best = found if best is None else best.or_better(found)
        stage = source.following(own, problem.held, found.labels, problem.shape)
        if stage is None:
            break
        source, variables = stage.source, torch.cat([stage.variables, rest], 1)
        problem = replace(problem, settings=replace(problem.settings, source=source), held=stage.held)
    assert best is not None
    return best


def _minimum(
    prepared: Prepared,
    problem: Problem,
    variables: Tensor,
    generators: Sequence[torch.Generator],
    report: Report,
    *,
    filmed: Sequence[int],
) -> Minimum:
    settings = prepared.settings
    enough = settings.enough * problem.zero_loss()
    if isinstance(settings.optimizer, EvolutionStrategy):
        return search(
            problem,
            variables,
            generators=generators,
            enough=enough,
            strategy=settings.optimizer,
            iterations=settings.iterations,
            capacity=prepared.capacity,
            report=report,
            filmed=filmed,
        )
    moves = prepared.moves
    if moves is not None:
        variables = moves.begin(problem, variables, generators)
    descent = Descent(
        optimizer=settings.optimizer,
        iterations=settings.iterations,
        projection=settings.projection,
        noise=settings.noise,
        moves=moves,
    )
    found = minimize(
        problem,
        variables,
        generators=generators,
        enough=enough,
        descent=descent,
        evaluate=prepared.evaluate,
        report=report,
        filmed=filmed,
    )
    if moves is None:
        return found
    read, loss = moves.end(problem, found.variables, generators)
    return replace(found, variables=read, loss=loss)


@torch.no_grad()
def _with_images(problem: Problem, minimum: Minimum) -> Found:
    return Found(
        images=problem.images(minimum.variables),
        labels=problem.guessed_labels(minimum.variables),
        loss=minimum.loss,
        history=minimum.history,
        films=films_of(problem, minimum),
    )
