"""Gradient inversion: search inputs whose gradient is the observed one, for many victims at once."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report, part_of
from fl_privacy.attacks.gradient_inversion.evident_defense import undo_evident_defenses
from fl_privacy.attacks.gradient_inversion.execution import compiler, fitting_threads, multiplications_of_a_layer
from fl_privacy.attacks.gradient_inversion.grouping import Group, GroupAttack, failed
from fl_privacy.attacks.gradient_inversion.minimization import filmed_rows, films_of, minimize, search
from fl_privacy.attacks.gradient_inversion.other_modalities import Restarted
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, PreparedVictim, prepare
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.optimizers import EvolutionStrategy
from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.generator import Provenance
from fl_privacy.rng import cpu_threads
from fl_privacy.types import Batch, Observation, Reconstruction
from fl_privacy.types.film import Snapshot, joined, shortened


@dataclass(frozen=True, eq=False)
class Solutions:
    """Results for V victims: ``images`` (V, B, C, H, W), ``labels`` (V, B) or (V, B, K), and ``loss`` (V,)."""

    images: Tensor
    labels: Tensor
    loss: Tensor
    history: Tensor  # losses (T, V) at T iterations, NaN after a victim has finished
    films: Mapping[int, tuple[Snapshot, ...]] = field(default_factory=dict)

    def or_better(self, other: "Solutions") -> "Solutions":
        loss, others = self.loss.nan_to_num(math.inf), other.loss.nan_to_num(math.inf)
        rows, numbers = others < loss, self.history.isfinite().sum(0).tolist()
        return Solutions(
            images=torch.where(rows.view(-1, 1, 1, 1, 1), other.images, self.images),
            labels=torch.where(rows.view(-1, *[1] * (self.labels.dim() - 1)), other.labels, self.labels),
            loss=torch.where(rows, other.loss, self.loss),
            history=torch.cat([self.history, other.history]),
            films={row: joined(film, numbers[row], other.films[row]) for row, film in self.films.items()},
        )


def minimize_in_stages(
    prepared: Prepared,
    problem: Problem,
    variables: Tensor,
    generators: Sequence[torch.Generator],
    report: Report,
    *,
    filmed: Sequence[int] = (),
) -> Solutions:
    """Minimize the loss of ``problem`` for V victims from ``variables`` (V, N), in each stage of the image source.

    Each stage optimizes other variables, such as a generator's latents, then its features. A victim's result is that of
    the stage with the least loss, not counting the source's penalty. ``filmed``: indices of victims whose guesses are
    recorded.
    """
    settings, moves, source = prepared.settings, prepared.moves, prepared.settings.source
    stages, best = 1 if source is None else source.stages, None
    for number in range(stages):
        shown, enough = part_of(report, number / stages, (number + 1) / stages), settings.enough * problem.zero_loss()
        given: dict[str, Any] = {"generators": generators, "enough": enough, "settings": settings, "report": shown}
        if isinstance(settings.optimizer, EvolutionStrategy):
            minimum = search(problem, variables, capacity=prepared.capacity, filmed=filmed, **given)
        else:
            first = variables if moves is None else moves.begin(problem, variables, generators)
            minimum = minimize(problem, first, evaluate=prepared.evaluate, filmed=filmed, moves=moves, **given)
            if moves is not None:
                decoded, loss = moves.end(problem, minimum.variables, generators)
                minimum = replace(minimum, variables=decoded, loss=loss)
        with torch.no_grad():
            films, images = films_of(problem, minimum), problem.images(minimum.variables)
            labels = problem.guessed_labels(minimum.variables)
        found = Solutions(images, labels, minimum.loss, minimum.history, films)
        if source is None or problem.held is None or stages == 1:
            return found
        own, rest = minimum.variables[:, : problem.pixels], minimum.variables[:, problem.pixels :]
        found = replace(found, loss=minimum.loss - source.penalty(own, problem.shape))
        best = found if best is None else best.or_better(found)
        stage = source.following(own, problem.held, found.labels, problem.shape)
        if stage is None:
            break
        source, variables, held = stage
        variables = torch.cat([variables, rest], 1)
        problem = replace(problem, settings=replace(problem.settings, source=source), held=held)
    assert best is not None
    return best


def attack_victims(prepared: Prepared, report: Report) -> dict[int, Reconstruction]:
    """Attack each victim until an attempt is accepted or no restarts are left; return results by victim."""
    together = prepared.attempts_together
    capacity = max(1, prepared.capacity // together) * together
    attempts: dict[int, list[Restarted]] = {victim.position: [] for victim in prepared.victims}
    pending, tried = list(prepared.victims), 0
    while pending and tried < prepared.restarts:
        left = prepared.restarts - tried
        at_once = left if tried and len(pending) * left <= capacity else together
        jobs = [(victim, tried + extra) for victim in pending for extra in range(at_once)]
        for begin in range(0, len(jobs), capacity):
            chunk, width = jobs[begin : begin + capacity], at_once / prepared.restarts / len(jobs)
            start = tried / prepared.restarts + width * begin
            shown = part_of(report, start, start + width * len(chunk))
            for victim, attempt in _attack_chunk(prepared, chunk, together, shown):
                attempts[victim.position].append(attempt)
        tried += at_once
        pending = [m for m in pending if not any(a.accepted for a in attempts[m.position])]
    return {m.position: _reconstruction(m, attempts[m.position], prepared) for m in prepared.victims}


def _attack_chunk(
    prepared: Prepared, jobs: Sequence[tuple[PreparedVictim, int]], together: int, report: Report
) -> list[tuple[PreparedVictim, Restarted]]:
    settings = prepared.settings
    victims, restarts = zip(*jobs, strict=True)
    with cpu_threads(1):
        problem = prepared.problem(victims, restarts, together)
        variables, generators = prepared.start(victims, restarts)
        size = multiplications_of_a_layer(prepared.observer, problem.images(variables))
    filmed = filmed_rows(victim.observation for victim in victims) if prepared.search.filmed else []
    with fitting_threads(size):
        found = minimize_in_stages(prepared, problem, variables, generators, report, filmed=filmed)
        images, labels = prepared.read(found.images), found.labels
        accepted = (found.loss < settings.accept * problem.zero_loss()).tolist()
    labels = prepared.rounds[0].victim_model.loss.answers(labels).cpu()
    histories = [tuple(row[row.isfinite()].tolist()) for row in found.history.T.cpu()]
    films = [found.films.get(row, ()) for row in range(len(victims))]
    columns = (restarts, found.loss.tolist(), accepted, images, labels, histories, films)
    return list(zip(victims, itertools.starmap(Restarted, zip(*columns, strict=True)), strict=True))


def _reconstruction(victim: PreparedVictim, attempts: Sequence[Restarted], prepared: Prepared) -> Reconstruction:
    in_order = sorted(attempts, key=lambda attempt: attempt.restart)
    chosen = next((a for a in in_order if a.accepted), min(in_order, key=lambda a: a.loss))
    if chosen.loss == float("inf"):
        return failed(victim.observation, "A finite objective is expected, but no start has one; check the update.")
    images, certain = prepared.search.answer(prepared.settings, in_order, chosen)
    return Reconstruction(
        id=victim.observation.id,
        batch=Batch(images, chosen.labels),
        cells_certain=certain,
        loss=chosen.loss,
        history=chosen.history,
        label_source=victim.label_source,
        countermeasures=prepared.countermeasures,
        film=shortened(chosen.film),
    )


@dataclass(frozen=True, kw_only=True)
class GradientInversion(GroupAttack, Settings):
    """Attack that minimizes ``objective(gradient(guess), observed) + priors(guess)`` over each victim's guess.

    Victims that share model, sent values, local training plan and shapes are computed in one batch, which changes the
    rounding of results; ``most_victims=1`` avoids that. The same call with as many CPU threads gives the same bits.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile == "on" and compiler() is None:
            raise UserError(
                "attack.compile=on is expected to find a C++ compiler, but there is none;"
                " install g++, name one in CXX, or use attack.compile=off."
            )

    def see(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        return undo_evident_defenses(observations, clips=True) if self.evident else observations

    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        with cpu_threads(1):  # a few evaluations, none known to need more
            prepared = prepare(self, group, seed)
        results = {p: failed(group.observations[p], why) for p, why in prepared.failures.items()}
        return results | (attack_victims(prepared, report) if prepared.victims else {})

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        return None if self.source is None else self.source.provenance(image)
