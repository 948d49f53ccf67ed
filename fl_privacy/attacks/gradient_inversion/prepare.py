"""The common work of a group of victims, and the problems of any chunk of it."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive.assumed_transform import Disguise
from fl_privacy.attacks.adaptive.assumed_transform import choose as choose_changes
from fl_privacy.attacks.adaptive.circumstances import Scene
from fl_privacy.attacks.adaptive.known_defense import counter
from fl_privacy.attacks.gradient_inversion import labels as labeling
from fl_privacy.attacks.gradient_inversion.budget import victims_at_once, written_bytes
from fl_privacy.attacks.gradient_inversion.compile import CompiledEvaluation, Evaluation, pays
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.attacks.gradient_inversion.initialization import Blank
from fl_privacy.attacks.gradient_inversion.objectives import audible
from fl_privacy.attacks.gradient_inversion.priors import GroupConsistency
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.statistics import Target
from fl_privacy.attacks.gradient_inversion.targets import accumulated_gradient, as_gradient, needs_unrolling, stack
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.gradients import Layered, OneByOne, Setting, Unrolled, VictimGradients, frozen_copy, victim_gradients
from fl_privacy.gradients.low_rank import factorize
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation, Tensors

if TYPE_CHECKING:
    from fl_privacy.attacks.gradient_inversion.attack import GradientInversion

_GUESSES = 64
_ATTEMPTS_THROUGH_CHANGES = 128
"""At a victim that may have been transformed, as long as each transformation gets one."""


class NotAttackableError(Exception):
    """Why the victims of a group can't be attacked, in one line."""


@dataclass(frozen=True, eq=False)
class Member:
    """A victim of a group: its labels (B,) or (B, K), ``None`` where they are optimized, and how they were found."""

    position: int
    observation: Observation
    labels: Tensor | None
    label_source: str


class Workload:
    """What is prepared once for a group."""

    def __init__(self, attack: "GradientInversion", group: Group, seed: int) -> None:
        first = group.first
        self._attack = attack
        self._seed = seed
        self._device = torch.device(attack.device or next(iter(first.sent.parameters.values())).device)
        self._dtype = torch.float64 if attack.dtype == "float64" else torch.float32
        self._shape = (first.upload.num_examples, *first.input_shape)
        self._num_classes = first.num_classes
        self._unrolls = needs_unrolling(first.plan, first.upload.num_examples, attack.local_steps)
        names = [name for name in first.sent.parameters if name in first.upload.tensors]
        self._names = audible(attack.objective.layers, names)
        model = frozen_copy(first.model, first.assumed(), first.plan, device=self._device, dtype=self._dtype)
        self._setting = Setting(model, self._names, first.plan)
        evaluating = replace(first.plan, batch_norm="eval")
        self._observer = frozen_copy(first.model, first.assumed(), evaluating, device=self._device, dtype=self._dtype)
        self._ranks: dict[str, int] = {}
        self._gradients = self._choose()
        scene = Scene.of(first, attack, self._names, unrolls=self._unrolls, learnable=self._learnable())
        self._counter = counter(first, scene)
        self._secret_features, self._secret_unit = 0, 1.0
        self._adapt()
        self._observations = dict(group.members)
        self._earlier = [Workload(attack, earlier, seed) for earlier in group.earlier]
        told = [self._label(*member) for member in group.members]
        self.failures = {position: why for position, why in told if isinstance(why, str)}
        self.members = [member for _, member in told if isinstance(member, Member)]

    @property
    def countermeasures(self) -> tuple[str, ...]:
        """What is done against the defense that is known, a sentence each."""
        joined = ("It matches the updates of several rounds from the same examples together.",) if self._earlier else ()
        each, asked = self._attempts_each, self._attack.restarts
        fewer = (f"Each transformation gets {each} of the {asked} attempts asked for.",) if each < asked else ()
        return (*self._counter.sentences, *fewer, *joined)

    def _choose(self) -> VictimGradients:
        trial = torch.rand((2, *self._shape), generator=torch.Generator().manual_seed(0))
        trial = trial.to(device=self._device, dtype=self._dtype)
        try:
            with torch.no_grad():
                logits = self._setting.model(trial[0])
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise NotAttackableError(f"The model does not take inputs of shape {self._shape}: {reason}") from error
        expected = (self._shape[0], self._num_classes)
        if logits.shape != expected:
            raise NotAttackableError(f"The model is expected to return {expected}, but got {tuple(logits.shape)}.")
        if self._unrolls:
            return Unrolled(self._setting)
        labels = torch.zeros(2, self._shape[0], dtype=torch.long, device=self._device)
        try:
            chosen = victim_gradients(self._setting, trial, labels)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise NotAttackableError(f"The model can't be differentiated twice: {reason}") from error
        if isinstance(chosen, Layered) and not self._attack.objective.elementwise:
            self._ranks = chosen.ranks(trial, labels)
        return chosen

    def _learnable(self) -> list[str]:
        """Weights of the linear layers into whose input unknown gradients can be guessed."""
        if not isinstance(self._gradients, Layered):
            return []
        linear = [path for path, module in self._setting.model.named_modules() if isinstance(module, nn.Linear)]
        return [weight for path in linear if (weight := f"{path}.weight") in self._names]

    def _adapt(self) -> None:
        """Take the clients' loss for what is known of it."""
        plan, secret, factor = self._setting.plan, self._counter.secret, self._counter.loss_factor
        if secret is None and factor == 1:
            return
        plan = replace(plan, loss_scale=plan.loss_scale * factor)
        self._setting = replace(self._setting, plan=plan, secret=secret.weight if secret else None)
        if secret:
            weight = self._setting.model.get_parameter(secret.weight)
            self._secret_features = weight.shape[1]
            self._secret_unit = secret.strength * (secret.weight_rms or float(weight.square().mean().sqrt()))
        self._gradients = self._gradients.under(self._setting)

    def _label(self, position: int, observation: Observation) -> tuple[int, Member | str]:
        told, policy = observation.knowledge.labels, self._attack.labels
        if policy == "optimize":
            return position, Member(position, observation, None, "optimized")
        if policy != "infer" and told is not None:
            dtype = self._dtype if told.is_floating_point() else torch.long
            return position, Member(position, observation, told.to(self._device, dtype), "known")
        if policy == "known":
            return position, "The attack is expected to be told the labels, but was not; use labels=auto."
        layer = labeling.output_layer(self._setting.model, self._num_classes)
        if layer is None:
            return position, "The model has no linear output layer to infer labels from; use labels=optimize."
        gradient = {
            name: g.to(device=self._device, dtype=self._dtype) / self._setting.plan.loss_scale
            for name, g in as_gradient(observation).items()
            if name in layer
        }
        generator = derive_generator(self._seed, "attack", str(observation.id), "labels")
        guesses = torch.rand((_GUESSES, *observation.input_shape), generator=generator)
        guesses = guesses.to(device=self._device, dtype=self._dtype)
        outputs = labeling.guessed_outputs(self._setting.model, guesses, layer[0])
        found = labeling.infer_labels(gradient, layer, self._shape[0], *outputs)
        if found is None:
            return (
                position,
                "The output layer's gradient was withheld, so no label can be inferred; use labels=optimize.",
            )
        return position, Member(position, observation, found, "inferred")

    @property
    def restarts(self) -> int:
        """Attempts at a victim: at each transformation that is known of, as many as the attack makes, or a few less."""
        return self._attempts_each * max(1, len(self._counter.changes))

    @property
    def attempts_together(self) -> int:
        """Neighboring attempts that look at each other; all go through the same transformation."""
        consistent = any(isinstance(prior, GroupConsistency) for prior in self._attack.priors)
        return self._attempts_each if consistent else 1

    @property
    def _attempts_each(self) -> int:
        """At each transformation."""
        asked, changes = self._attack.restarts, len(self._counter.changes)
        return min(asked, max(1, _ATTEMPTS_THROUGH_CHANGES // changes)) if changes else asked

    def problem(self, members: Sequence[Member], restarts: Sequence[int], attempts: int = 1) -> Problem:
        """Of a chunk, in which every ``attempts`` neighbors are the same member, with the number of each attempt."""
        values = stack([self._target(m.observation) for m in members], self._names, self._device, self._dtype)
        told = self._counter.told([m.observation for m in members], self._target).to(self._device, self._dtype)
        targets = {name: Target.of(value, told.bounds.get(name)) for name, value in values.items()}
        factors = {}
        for name, rank in self._ranks.items():
            found = None if told.clip or name in told.bounds else factorize(values[name].flatten(2), rank)
            if found is not None:
                factors[name], targets[name] = found, targets[name].without_value()
        labels = [m.labels for m in members if m.labels is not None]
        problem = Problem(
            gradients=self._gradients,
            objective=self._attack.objective,
            priors=self._attack.priors,
            space=self._attack.space,
            shape=self._shape,
            num_classes=self._num_classes,
            targets=targets,
            factors=factors,
            labels=torch.stack(labels) if labels else None,
            observer=self._observer,
            attempts=attempts,
            clip=told.clip,
            secret_features=self._secret_features,
            secret_unit=self._secret_unit,
            disguise=self._disguise(members, restarts),
            others=[
                earlier.problem([replace(m, observation=earlier._observations[m.position]) for m in members], restarts)
                for earlier in self._earlier
            ],
        )
        return replace(problem, smoothness=told.smoothness * problem.zero_loss()) if told.smoothness else problem

    def _disguise(self, members: Sequence[Member], restarts: Sequence[int]) -> Disguise | None:
        changes = self._counter.changes
        if not changes:
            return None
        draws = [restart // self.attempts_together for restart in restarts]
        chosen = [
            choose_changes(
                len(changes),
                draw,
                self._shape[0],
                derive_generator(self._seed, "attack", str(member.observation.id), draw, "changes"),
            )
            for member, draw in zip(members, draws, strict=True)
        ]
        return Disguise(changes, torch.stack(chosen).to(self._device))

    def _target(self, observation: Observation) -> Tensors:
        return accumulated_gradient(observation) if self._unrolls else as_gradient(observation)

    def start(self, members: Sequence[Member], restarts: Sequence[int]) -> tuple[Tensor, list[torch.Generator]]:
        """First variables (V, N) and random stream of each victim."""
        generators = [
            derive_generator(self._seed, "attack", str(member.observation.id), restart)
            for member, restart in zip(members, restarts, strict=True)
        ]
        rows = []
        for member, generator in zip(members, generators, strict=True):
            blank = Blank(
                observation=member.observation,
                labels=member.labels,
                shape=self._shape,
                generator=generator,
                space=self._attack.space,
            )
            pixels = self._attack.start(blank)
            row = [pixels.to(self._dtype).flatten()]
            if member.labels is None:
                row.append(torch.randn(self._shape[0] * self._num_classes, generator=generator).to(self._dtype))
            secrets = (1 + len(self._earlier)) * self._shape[0] * self._secret_features
            row.append(torch.zeros(secrets, dtype=self._dtype))
            rows.append(torch.cat(row))
        return torch.stack(rows).to(self._device), generators

    @cached_property
    def capacity(self) -> int:
        """How many victims to attack at once."""
        if self._attack.most_victims is not None:
            return self._attack.most_victims
        return victims_at_once(*self._trial(), self._attack.optimizer)

    @cached_property
    def evaluate(self) -> Evaluation:
        """How the problems are evaluated."""
        attack = self._attack
        obstacle = self._obstacle
        if obstacle and attack.compile == "on":
            warnings.warn(f"The attack goes on without being compiled: {obstacle}.", stacklevel=2)
        if obstacle or attack.compile == "off":
            return Problem.evaluate
        if attack.compile == "on":
            return CompiledEvaluation(demanded=True)
        # victims that finish one by one leave batches of ever new sizes behind
        shrinks = isinstance(attack.optimizer, LBFGS) or attack.enough > 0
        if shrinks:
            return Problem.evaluate
        worthwhile = pays(
            self._device,
            runs=attack.iterations * math.ceil(len(self.members) / self.capacity),
            written=attack.iterations * len(self.members) * written_bytes(*self._trial()),
            tensors=len(self._names),
        )
        return CompiledEvaluation(demanded=False) if worthwhile else Problem.evaluate

    @property
    def _obstacle(self) -> str | None:
        """Why the problems can't be compiled."""
        if self._counter.changes:
            return "its guesses go through transformations that differ from attempt to attempt"
        if isinstance(self._gradients, OneByOne):
            return "the gradients of this model are taken victim by victim"
        return None

    def _trial(self) -> tuple[Problem, Tensor]:
        """The problem of one victim and its start."""
        member = self.members[:1]
        return self.problem(member, [0]), self.start(member, [0])[0]
