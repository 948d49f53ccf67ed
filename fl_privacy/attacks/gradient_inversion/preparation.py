"""Prepare a group of victims: the tensors matched in each round, and the problem of each chunk."""

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive import (
    AssumedTransform,
    AttackSetting,
    Constraints,
    KnownDefense,
    Unknowns,
    all_known,
    choose_transforms,
)
from fl_privacy.attacks.adaptive.constraints import Bounds, widest
from fl_privacy.attacks.gradient_inversion import execution
from fl_privacy.attacks.gradient_inversion.evident_defense import smoothing_of
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.attacks.gradient_inversion.labels import choose_labels, output_layer
from fl_privacy.attacks.gradient_inversion.layer_statistics import Target
from fl_privacy.attacks.gradient_inversion.objectives import weighted_names
from fl_privacy.attacks.gradient_inversion.other_modalities import Search, as_wide, search_of
from fl_privacy.attacks.gradient_inversion.priors import BatchNormStatistics, GroupConsistency, uploaded_statistics
from fl_privacy.attacks.gradient_inversion.problem import Problem, RoundUpdates
from fl_privacy.attacks.gradient_inversion.settings import Settings, VictimContext
from fl_privacy.attacks.gradient_inversion.targets import (
    NotAttackableError,
    accumulated_gradient,
    as_gradient,
    matched_per_uploaded,
    needs_unrolling,
    stack,
)
from fl_privacy.attacks.gradient_inversion.word_order import Rearranged, rearranged
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.models.gradients import (
    Layered,
    OneByOne,
    Unrolled,
    VictimGradients,
    VictimModel,
    frozen_copy,
    victim_gradients,
)
from fl_privacy.models.gradients.layered import factorize
from fl_privacy.models.losses import CROSS_ENTROPY, is_plain
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation, Tensors
from fl_privacy.types.modality import modality_of


@dataclass(frozen=True, eq=False)
class PreparedRound:
    """Model, compared tensors and gradient method that the victims of a group share in one round."""

    observations: Mapping[int, Observation]
    victim_model: VictimModel  # model, matched tensors, plan and loss as known
    unrolls: bool
    gradients: VictimGradients
    ranks: Mapping[str, int]  # ranks of the gradients that need not be formed
    compared: Collection[str]  # weights whose gradients are formed and compared a few victims at a time
    known: KnownDefense
    unknowns: Unknowns | None

    def matched(self, observation: Observation) -> Tensors:
        return accumulated_gradient(observation) if self.unrolls else as_gradient(observation)

    def of(self, positions: Sequence[int]) -> RoundUpdates:
        observations = [self.observations[position] for position in positions]
        parameter, matched = next(self.victim_model.model.parameters()), list(map(self.matched, observations))
        values = stack(matched, list(self.victim_model.names), parameter.device, parameter.dtype)
        known = self.known.update_constraints(observations, self.matched)
        each = [bounds for o in observations if (bounds := o.knowledge.bounds) is not None]
        left: Bounds = {}
        if len(each) == len(observations):  # what optimizers leave of the gradients
            pairs = {name: [bounds[name] for bounds in each] for name in each[0]}
            left = {n: (torch.stack([b for b, _ in p]), torch.stack([b for _, b in p])) for n, p in pairs.items()}
        known = replace(known, bounds=widest([known.bounds, left])).to(parameter.device, parameter.dtype)
        for name, (low, high) in left.items():
            unmatched = (low.isinf() & high.isinf()).to(parameter.device)
            values[name] = values[name].masked_fill(unmatched, 0) if name in values else values[name]
        targets = {name: Target.of(value, known.bounds.get(name)) for name, value in values.items()}
        factors = {}
        for name, rank in self.ranks.items():
            found = None if known.clip or name in known.bounds else factorize(values[name].flatten(2), rank)
            if found is not None:
                factors[name], targets[name] = found, targets[name].without_value()
        compared = () if known.clip or known.bounds else self.compared
        return RoundUpdates(self.gradients, targets, factors, known.clip, compared)


def prepare_round(settings: Settings, group: Group, *, device: torch.device, dtype: torch.dtype) -> PreparedRound:
    """Prepare model, compared tensors and gradient method for the updates of ``group``, which are of one round."""
    first = group.first
    uploaded = [name for name in first.sent.parameters if name in first.upload.tensors]
    names = weighted_names(settings.objective.layers, search_of(first.model).matched(uploaded, first.model))
    unrolls = needs_unrolling(first.plan, first.upload.num_examples, settings.local_steps)
    model = frozen_copy(first.model, first.assumed(), first.plan, device=device, dtype=dtype)
    victim_model = VictimModel(model, names, first.plan, loss=first.loss or CROSS_ENTROPY)
    trial = _trial(victim_model, first)
    scales = settings.objective.elementwise
    gradients, ranks, compared = _choose(victim_model, trial, unrolls=unrolls, elementwise=scales)
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    learnable = [f"{path}.weight" for path in linear if f"{path}.weight" in names]
    pixels = settings.source is None and modality_of(first.model).pixels
    circumstances = circumstances_of(
        first,
        unrolls=unrolls,
        scales=scales,
        complete=set(names) == set(first.sent.parameters),
        smooths=not pixels or any(getattr(prior, "smooths", False) for prior in settings.priors),
        pixels=pixels,
        learnable=learnable if isinstance(gradients, Layered) else [],
    )
    known = KnownDefense.of(first, circumstances)
    unknowns = None
    if known.hidden or known.loss_factor != 1:
        plan = replace(first.plan, loss_scale=first.plan.loss_scale * known.loss_factor)
        victim_model = replace(victim_model, plan=plan, hidden=known.hidden.weight if known.hidden else None)
        unknowns = known.hidden.unknowns(model.get_parameter(known.hidden.weight)) if known.hidden else None
        gradients = gradients.under(victim_model)
    return PreparedRound(group.observations, victim_model, unrolls, gradients, ranks, compared, known, unknowns)


def _trial(victim_model: VictimModel, first: Observation) -> torch.Tensor:
    search = search_of(first.model)
    shape = (first.upload.num_examples, *search.input_of_one(first))
    parameter = next(victim_model.model.parameters())
    trial = search.trial(torch.rand((2, *shape), generator=torch.Generator().manual_seed(0)).to(parameter))
    try:
        with torch.no_grad():
            logits = victim_model.model(trial[0])
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NotAttackableError(
            f"Inputs {shape} are expected, but the model fails: {reason}; set input_shape."
        ) from error
    expected = (shape[0], first.num_classes)
    if logits.shape[:2] != expected:
        raise NotAttackableError(f"Outputs {expected} are expected, but got {tuple(logits.shape)}; set num_classes.")
    return trial


def _choose(
    victim_model: VictimModel, trial: torch.Tensor, *, unrolls: bool, elementwise: bool
) -> tuple[VictimGradients, Mapping[str, int], Sequence[str]]:
    if unrolls:
        return _unrolled(victim_model, trial), {}, ()
    of_one = trial.shape[2:3] if getattr(victim_model.model, "next_token", False) else ()
    labels = torch.zeros((*trial.shape[:2], *of_one), dtype=torch.long, device=trial.device)
    try:
        chosen = victim_gradients(victim_model, trial, labels)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise NotAttackableError(f"Second derivatives are expected, but fail: {reason}; replace that layer.") from error
    if not isinstance(chosen, Layered):
        return chosen, {}, ()
    if not elementwise:
        return chosen, chosen.ranks(trial, labels), ()
    return chosen, {}, chosen.linear_weights(trial, labels) if search_of(victim_model.model).elementwise_parts else ()


def _unrolled(victim_model: VictimModel, trial: torch.Tensor) -> Unrolled:
    unrolled = Unrolled(victim_model, trial)
    if not is_plain(victim_model.loss):
        labels = torch.zeros(trial.shape[:2], dtype=torch.long, device=trial.device)
        try:
            unrolled(trial, labels)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise NotAttackableError(
                f"A loss that torch.func can replay is expected, but {victim_model.loss.name} fails: {reason}; use"
                " attack.local_steps=first_order."
            ) from error
    return unrolled


def circumstances_of(
    first: Observation,
    *,
    unrolls: bool,
    scales: bool,
    complete: bool,
    smooths: bool,
    pixels: bool,
    learnable: Sequence[str],
) -> AttackSetting:
    """Return the :class:`AttackSetting` of a group of updates like ``first``; the other arguments are its fields."""
    layer = output_layer(first.model, first.num_classes)
    return AttackSetting(
        head=layer[0] if layer else None,
        batch_size=first.upload.num_examples,
        plan=first.plan,
        unrolls=unrolls,
        matched_per_uploaded=matched_per_uploaded(first.plan, first.upload.num_examples, unrolls=unrolls),
        scales=scales,
        complete=complete,
        smooths=smooths,
        pixels=pixels,
        learnable=learnable,
    )


_ATTEMPTS_THROUGH_TRANSFORMS = 128
"""Most attempts at a victim whose images may be transformed, but at least one for each transformation."""


@dataclass(frozen=True, eq=False)
class PreparedVictim:
    """An attacked update with labels (B,) or (B, K); ``None`` if they are optimized along with the inputs.

    ``position``: key of its result. ``label_source``: ``known``, ``inferred`` or ``optimized``.
    """

    position: int
    observation: Observation
    labels: Tensor | None
    label_source: str


@dataclass(frozen=True, eq=False)
class Prepared:
    """Values that an attack on a group of victims computes once, before it optimizes guesses."""

    settings: Settings
    seed: int
    shape: tuple[int, ...]  # (B, C, H, W) of a victim's guess
    num_classes: int
    rounds: Sequence[PreparedRound]  # the last round first
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
        return self._attempts_each if any(isinstance(prior, GroupConsistency) for prior in self.settings.priors) else 1

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
            smoothed = torch.tensor([victim.position in self._smoothings for victim in victims]).to(self._like.device)
            both = [self._smoothings.get(victim.position, (0.0, 0.0)) for victim in victims]
            own, likeliest = torch.tensor(both).to(self._like).T
            smoothness = torch.where(smoothed, own, smoothness)
        return replace(problem, constraints=replace(problem.constraints, smoothness=smoothness, likeliest=likeliest))

    def _unsmoothed(self, victims: Sequence[PreparedVictim], restarts: Sequence[int], attempts: int = 1) -> Problem:
        labels = [m.labels for m in victims if m.labels is not None]
        return Problem(
            settings=self.settings,
            shape=self.shape,
            num_classes=self.num_classes,
            rounds=[one.of([m.position for m in victims]) for one in self.rounds],
            labels=torch.stack(labels) if labels else None,
            observer=self.observer,
            attempts=attempts,
            constraints=Constraints(transform=self.transform(victims, restarts), unknowns=self.rounds[0].unknowns),
            held=self._held(victims, restarts),
            of_outputs=self.rounds[0].victim_model.loss,
            own_statistics=self._own_statistics(victims),
        )

    def _own_statistics(self, victims: Sequence[PreparedVictim]) -> Tensors:
        if not any(isinstance(prior, BatchNormStatistics) for prior in self.settings.priors):
            return {}
        found = [uploaded_statistics(victim.observation) for victim in victims]
        return {name: torch.stack([one[name] for one in found]).to(self._like) for name in found[0] if all(found)}

    @cached_property
    def _smoothings(self) -> dict[int, tuple[float, float]]:
        """Return each victim's two total variation weights (:data:`Smoothing`); empty if noise is not measured."""
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
        draws = [restart // self.attempts_together for restart in restarts]
        streams = [self._stream(*one, "changes") for one in zip(victims, draws, strict=True)]
        given = zip(draws, streams, strict=True)
        chosen = [choose_transforms(len(transforms), draw, self.shape[0], rng) for draw, rng in given]
        return AssumedTransform(transforms, torch.stack(chosen).to(self._like.device))

    def _held(self, victims: Sequence[PreparedVictim], restarts: Sequence[int]) -> Tensor | None:
        source = self.settings.source
        if source is None:
            return None
        pairs = zip(victims, restarts, strict=True)
        rows = [source.held(self._context(one, self._stream(one, restart, "held"))) for one, restart in pairs]
        return torch.stack(rows).to(self._like)

    def start(self, victims: Sequence[PreparedVictim], restarts: Sequence[int]) -> tuple[Tensor, list[torch.Generator]]:
        generators = list(map(self._stream, victims, restarts))
        return torch.stack(list(map(self._row, victims, generators))).to(self._like.device), generators

    def _stream(self, victim: PreparedVictim, *parts: int | str) -> torch.Generator:
        return derive_generator(self.seed, "attack", str(victim.observation.id), *parts)

    def _context(self, victim: PreparedVictim, generator: torch.Generator) -> VictimContext:
        return VictimContext(victim.observation, victim.labels, self.shape, generator, self.settings.space)

    def _row(self, victim: PreparedVictim, generator: torch.Generator) -> Tensor:
        draws = self.settings.start if self.settings.source is None else self.settings.source.start
        parts = [draws(self._context(victim, generator)).flatten()]
        if victim.labels is None:
            parts.append(torch.randn(self.shape[0] * self.num_classes, generator=generator))
        if unknowns := self.rounds[0].unknowns:
            parts.append(torch.zeros(len(self.rounds) * self.shape[0] * unknowns.features))
        return torch.cat([part.to(self._like.dtype) for part in parts])

    @cached_property
    def capacity(self) -> int:
        if self.settings.most_victims is not None or not self.victims:
            return self.settings.most_victims or 1
        return execution.victims_at_once(*self._trial(), self.settings.optimizer, victims=len(self.victims))

    @cached_property
    def moves(self) -> Rearranged | None:
        settings, first = self.settings, self.victims[0].observation
        return rearranged(settings.moves, first, iterations=settings.iterations, capacity=self.capacity)

    @cached_property
    def evaluate(self) -> execution.ValueAndGradient:
        settings, obstacle = self.settings, self._obstacle
        if obstacle and settings.compile == "on":
            warnings.warn(
                f"The attack goes on without being compiled: {obstacle}; set attack.compile=off.", stacklevel=2
            )
        if obstacle:
            return Problem.evaluate
        if settings.compile == "on":
            return execution.CompiledEvaluation(demanded=True)
        # victims that finish one by one leave batches of ever new sizes
        shrinks = isinstance(settings.optimizer, LBFGS) or settings.enough > 0
        if settings.compile == "off" or shrinks:
            return self._uncompiled
        worthwhile = execution.compiling_pays(
            self._like.device,
            runs=settings.iterations * math.ceil(len(self.victims) / self.capacity),
            written=settings.iterations * len(self.victims) * execution.written_bytes(*self._trial()),
            tensors=len(self.rounds[0].victim_model.names),
        )
        return execution.CompiledEvaluation(demanded=False) if worthwhile else self._uncompiled

    @property
    def _uncompiled(self) -> execution.ValueAndGradient:
        at_once = min(self.capacity, len(self.victims) * self.restarts)
        inner = self.settings.optimizer.inner if isinstance(self.settings.optimizer, LBFGS) else 1
        evaluations = inner * self.settings.iterations
        faster = execution.RecordedEvaluation if self._like.device.type == "cpu" else execution.CapturedEvaluation
        return faster() if faster.pays(at_once, evaluations) else Problem.evaluate

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
        if self._own_statistics(self.victims[:1]):
            return "batch norm's statistics are compared victim by victim"
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
    """Compute what an attack on ``group`` needs before it optimizes; ``NotAttackableError`` if that is impossible."""
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
    observer = frozen_copy(first.model, first.assumed(), evaluating, device=device, dtype=dtype)
    return Prepared(settings, seed, shape, first.num_classes, rounds, observer, victims, failures)
