"""Prepare a group of victims, and build the problems of its chunks."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive import AssumedTransform, Constraints, all_known, choose_transforms
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.cuda_graph import CapturedEvaluation, capturing_pays
from fl_privacy.attacks.gradient_inversion.execution import (
    CompiledEvaluation,
    RecordedEvaluation,
    ValueAndGradient,
    compiling_pays,
    recording_pays,
    victims_at_once,
    written_bytes,
)
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.attacks.gradient_inversion.labels import choose_labels
from fl_privacy.attacks.gradient_inversion.matching_targets import PreparedRound, prepare_round
from fl_privacy.attacks.gradient_inversion.noise import smoothing_of
from fl_privacy.attacks.gradient_inversion.other_modalities import Search, as_wide, search_of
from fl_privacy.attacks.gradient_inversion.priors import GroupConsistency
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.gradient_inversion.starts import Blank
from fl_privacy.attacks.gradient_inversion.word_order import Rearranged, rearranged
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.models.gradients import OneByOne, frozen_copy
from fl_privacy.models.losses import is_plain
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation

_ATTEMPTS_THROUGH_TRANSFORMS = 128
"""Most attempts at a victim that may have been transformed, but at least one for each transformation."""


@dataclass(frozen=True, eq=False)
class PreparedVictim:
    """A victim, with labels (B,) or (B, K), ``None`` if they are optimized, and their source."""

    position: int
    observation: Observation
    labels: Tensor | None
    label_source: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """All that is computed once for a group.

    Attributes:
        shape: (B, C, H, W) of one victim.
        rounds: matched updates, the last round's first.
    """

    settings: Settings
    seed: int
    shape: tuple[int, ...]
    num_classes: int
    rounds: Sequence[PreparedRound]
    observer: nn.Module
    victims: Sequence[PreparedVictim]
    failures: dict[int, str]

    @property
    def countermeasures(self) -> tuple[str, ...]:
        joined = "It matches the updates of several rounds from the same examples together."
        each, asked = self._attempts_each, self.settings.restarts
        fewer = (f"Each transformation gets {each} of the {asked} attempts asked for.",) if each < asked else ()
        return (*self.rounds[0].known.sentences, *fewer, *((joined,) if len(self.rounds) > 1 else ()))

    @property
    def restarts(self) -> int:
        return self._attempts_each * max(1, len(self.rounds[0].known.transforms))

    @property
    def attempts_together(self) -> int:
        consistent = any(isinstance(prior, GroupConsistency) for prior in self.settings.priors)
        return self._attempts_each if consistent else 1

    @property
    def _attempts_each(self) -> int:
        asked, transforms = self.settings.restarts, len(self.rounds[0].known.transforms)
        return min(asked, max(1, _ATTEMPTS_THROUGH_TRANSFORMS // transforms)) if transforms else asked

    def problem(self, victims: Sequence[PreparedVictim], restarts: Sequence[int], attempts: int = 1) -> Problem:
        problem, known = self._unsmoothed(victims, restarts, attempts), self.rounds[0].known
        if not known.smoothness and not self._smoothings:
            return problem
        smoothness, likeliest = known.smoothness * problem.blank_loss() / len(self.rounds), None
        if self._smoothings:
            told = torch.tensor([victim.position in self._smoothings for victim in victims]).to(self._like.device)
            both = [self._smoothings.get(victim.position, (0.0, 0.0)) for victim in victims]
            own, likeliest = torch.tensor(both).to(self._like).T
            smoothness = torch.where(told, own, smoothness)
        return replace(problem, constraints=replace(problem.constraints, smoothness=smoothness, likeliest=likeliest))

    def _unsmoothed(self, victims: Sequence[PreparedVictim], restarts: Sequence[int], attempts: int = 1) -> Problem:
        labels = [m.labels for m in victims if m.labels is not None]
        constraints = Constraints(transform=self.transform(victims, restarts), unknowns=self.rounds[0].unknowns)
        return Problem(
            settings=self.settings,
            shape=self.shape,
            num_classes=self.num_classes,
            rounds=[one.of([m.position for m in victims]) for one in self.rounds],
            labels=torch.stack(labels) if labels else None,
            observer=self.observer,
            attempts=attempts,
            constraints=constraints,
            held=self._held(victims, restarts),
            of_outputs=self.rounds[0].victim_model.loss,
        )

    @cached_property
    def _smoothings(self) -> dict[int, tuple[float, float]]:
        """Return, by position, the weights of ``Smoothing``; empty if no noise is known or measured."""
        first = self.rounds[0]
        if not first.known.noisy or first.unknowns or self.settings.source is not None:
            return {}
        known = [
            victim
            for victim in self.victims
            if all(all_known(one.known.bounds(one.observations[victim.position].update())) for one in self.rounds)
        ]
        found = smoothing_of(
            [victim.observation for victim in known],
            lambda chunk: self._unsmoothed(known[chunk], [0] * len(known[chunk])),
            self.capacity,
        )
        return {victim.position: own for victim, own in zip(known, found or (), strict=bool(found))}

    def transform(self, victims: Sequence[PreparedVictim], restarts: Sequence[int]) -> AssumedTransform | None:
        transforms = self.rounds[0].known.transforms
        if not transforms:
            return None
        chosen = []
        for victim, restart in zip(victims, restarts, strict=True):
            draw = restart // self.attempts_together
            rng = derive_generator(self.seed, "attack", str(victim.observation.id), draw, "changes")
            chosen.append(choose_transforms(len(transforms), draw, self.shape[0], rng))
        return AssumedTransform(transforms, torch.stack(chosen).to(self._like.device))

    def _held(self, victims: Sequence[PreparedVictim], restarts: Sequence[int]) -> Tensor | None:
        """Return the values (V, m) that the source of images holds fixed."""
        source = self.settings.source
        if source is None:
            return None
        rows = []
        for victim, restart in zip(victims, restarts, strict=True):
            rng = derive_generator(self.seed, "attack", str(victim.observation.id), restart, "held")
            rows.append(source.held(self._blank(victim, rng)))
        return torch.stack(rows).to(self._like)

    def start(self, victims: Sequence[PreparedVictim], restarts: Sequence[int]) -> tuple[Tensor, list[torch.Generator]]:
        generators = [
            derive_generator(self.seed, "attack", str(victim.observation.id), restart)
            for victim, restart in zip(victims, restarts, strict=True)
        ]
        rows = [self._row(victim, generator) for victim, generator in zip(victims, generators, strict=True)]
        return torch.stack(rows).to(self._like.device), generators

    def _blank(self, victim: PreparedVictim, generator: torch.Generator) -> Blank:
        return Blank(
            observation=victim.observation,
            labels=victim.labels,
            shape=self.shape,
            generator=generator,
            space=self.settings.space,
        )

    def _row(self, victim: PreparedVictim, generator: torch.Generator) -> Tensor:
        draws = self.settings.start if self.settings.source is None else self.settings.source.start
        parts = [draws(self._blank(victim, generator)).flatten()]
        if victim.labels is None:
            parts.append(torch.randn(self.shape[0] * self.num_classes, generator=generator))
        if unknowns := self.rounds[0].unknowns:
            parts.append(torch.zeros(len(self.rounds) * self.shape[0] * unknowns.features))
        return torch.cat([part.to(self._like.dtype) for part in parts])

    @cached_property
    def capacity(self) -> int:
        if self.settings.most_victims is not None or not self.victims:
            return self.settings.most_victims or 1
        return victims_at_once(*self._trial(), self.settings.optimizer, victims=len(self.victims))

    @cached_property
    def moves(self) -> Rearranged | None:
        settings, first = self.settings, self.victims[0].observation
        return rearranged(settings.moves, first, iterations=settings.iterations, capacity=self.capacity)

    @cached_property
    def evaluate(self) -> ValueAndGradient:
        settings, obstacle = self.settings, self._obstacle
        if obstacle and settings.compile == "on":
            warnings.warn(f"The attack goes on without being compiled: {obstacle}.", stacklevel=2)
        if obstacle:
            return Problem.evaluate
        plain = self._uncompiled
        if settings.compile == "off":
            return plain
        if settings.compile == "on":
            return CompiledEvaluation(demanded=True)
        # victims that finish one by one leave batches of ever new sizes
        shrinks = isinstance(settings.optimizer, LBFGS) or settings.enough > 0
        if shrinks:
            return plain
        worthwhile = compiling_pays(
            self._like.device,
            runs=settings.iterations * math.ceil(len(self.victims) / self.capacity),
            written=settings.iterations * len(self.victims) * written_bytes(*self._trial()),
            tensors=len(self.rounds[0].victim_model.names),
        )
        return CompiledEvaluation(demanded=False) if worthwhile else plain

    @property
    def _uncompiled(self) -> ValueAndGradient:
        at_once = min(self.capacity, len(self.victims) * self.restarts)
        inner = self.settings.optimizer.inner if isinstance(self.settings.optimizer, LBFGS) else 1
        evaluations = inner * self.settings.iterations
        if self._like.device.type != "cpu":
            return CapturedEvaluation() if capturing_pays(at_once, evaluations) else Problem.evaluate
        return RecordedEvaluation() if recording_pays(at_once, evaluations) else Problem.evaluate

    @property
    def search(self) -> Search:
        return search_of(self.victims[0].observation.model)

    def read(self, inputs: Tensor) -> Tensor:
        found = self.search.read(self.settings, inputs)  # as float32: finer digits depend on the size of batches
        precision = self.victims[0].observation.precision
        return (found.to(precision) if found.is_floating_point() else found).cpu()

    @property
    def _obstacle(self) -> str | None:
        if self.rounds[0].known.transforms:
            return "its guesses go through transformations that differ from attempt to attempt"
        if self.search.varies:
            return self.search.varies
        if self.settings.source is not None and self.settings.source.stages > 1:
            return "what is optimized changes from stage to stage"
        if isinstance(self.rounds[0].gradients, OneByOne) or not is_plain(self.rounds[0].victim_model.loss):
            return "the gradients of this model are taken victim by victim"
        return None

    def _trial(self) -> tuple[Problem, Tensor]:
        victim = self.victims[:1]
        return self._unsmoothed(victim, [0]), self.start(victim, [0])[0]

    @property
    def _like(self) -> Tensor:
        return next(self.observer.parameters())


def prepare(settings: Settings, group: Group, seed: int) -> Prepared:
    """Prepare ``group`` for the attack of ``settings``.

    Raises:
        NotAttackableError: no victim can be attacked.
    """
    first, search = group.first, search_of(group.first.model)
    settings = search.adapted(settings, first)
    device = torch.device(settings.device or next(iter(first.sent.parameters.values())).device)
    dtype = torch.float64 if settings.dtype == "float64" else torch.float32
    rounds = [prepare_round(settings, one, device=device, dtype=dtype) for one in (group, *group.earlier)]
    evaluating = replace(first.plan, batch_norm="eval")
    victim_model, victims, failures = rounds[0].victim_model, [], {}
    shape = (first.upload.num_examples, *search.variables_of_one(first, list(group.observations.values())))
    for position, observation in group.observations.items():
        try:
            found = choose_labels(
                observation, settings.labels, victim_model.model, loss_scale=victim_model.plan.loss_scale, seed=seed
            )
        except NotAttackableError as reason:
            failures[position] = str(reason)
        else:
            victims.append(PreparedVictim(position, observation, as_wide(found[0], shape[1]), found[1]))
    return Prepared(
        settings=settings,
        seed=seed,
        shape=shape,
        num_classes=first.num_classes,
        rounds=rounds,
        observer=frozen_copy(first.model, first.assumed(), evaluating, device=device, dtype=dtype),
        victims=victims,
        failures=failures,
    )
