"""Combine the countermeasures against a known defense."""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive import constraints
from fl_privacy.attacks.adaptive.countermeasures import (
    Circumstances,
    Countermeasure,
    countermeasures_against,
    looks_noisy,
)
from fl_privacy.effects import Clipped, Description, Effect, Noise, NoisedLayers, SlicedNoise, Summed
from fl_privacy.types import Observation, Tensors

logger: logging.Logger = logging.getLogger(__name__)

MOST_SEQUENCES = 1024  # largest number of sequences of transforms that are tried one by one

Matched = Callable[[Observation], Tensors]  # function from an observation to the tensors that an attack matches


@dataclass(frozen=True)
class KnownDefense:
    """Countermeasures against one known defense.

    Attributes:
        countermeasures: sequence in the order of the defense's parts.
        noise_stds: standard deviations of the parts that add noise, in units of the update; ``None`` if unknown.
    """

    countermeasures: tuple[Countermeasure, ...] = ()
    noise_stds: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, observation: Observation, circumstances: Circumstances) -> "KnownDefense":
        parts = _as_seen(observation.knowledge.defense or ())
        found = _taken(parts, circumstances)
        if any(countermeasure.rule for countermeasure in found):  # bounds are in the units of the clipped update
            found = _taken(parts, replace(circumstances, scales=True))
        for name in uncountered(parts):
            logger.info("No countermeasure is known against %s, which is attacked as if unknown.", name)
        stds = [_noise_std(part.effect, circumstances) for part in parts if looks_noisy(part.effect)]
        return cls(tuple(found), tuple(stds))

    @property
    def sentences(self) -> tuple[str, ...]:
        said = [countermeasure.sentence for countermeasure in self.countermeasures]
        if self.hidden and (others := {h.weight for h in self._hidden} - {self.hidden.weight}):
            said.append(f"It leaves out what private heads send back elsewhere, before {', '.join(sorted(others))}.")
        tried, ways = len(self.transforms), math.prod(self._numbers_of_transforms)
        if tried < ways:
            said.append(
                f"It leaves out that several defenses change the image: they may do so in {ways} ways together, of"
                f" which it tries the {tried} of the one with the most."
            )
        return tuple(dict.fromkeys(said))

    @property
    def hidden(self) -> constraints.HiddenGradient | None:
        """Return the strongest hidden gradient, which alone is guessed; those of the same features add up to it."""
        return max(self._hidden, key=lambda hidden: hidden.strength, default=None)

    @property
    def _hidden(self) -> list[constraints.HiddenGradient]:
        return [countermeasure.hidden for countermeasure in self.countermeasures if countermeasure.hidden]

    @property
    def loss_factor(self) -> float:
        return math.prod(countermeasure.loss_factor for countermeasure in self.countermeasures)

    @property
    def transforms(self) -> tuple[constraints.Transform, ...]:
        """Return the client's possible transforms, with several defenses all sequences up to ``MOST_SEQUENCES``."""
        each = [countermeasure.transforms for countermeasure in self.countermeasures if countermeasure.transforms]
        if len(each) < 2 or math.prod(self._numbers_of_transforms) > MOST_SEQUENCES:
            return max(each, key=len, default=())
        return tuple(partial(_in_turn, sequence) for sequence in itertools.product(*each))

    @property
    def _numbers_of_transforms(self) -> list[int]:
        return [len(each.transforms) for each in self.countermeasures if each.transforms] or [0]

    @property
    def smoothness(self) -> float:
        """Return the weight of total variation of one round, in units of ``Problem.blank_loss``."""
        return max((m.smoothness for m in self.countermeasures), default=0.0)

    @property
    def noisy(self) -> bool:
        return any(m.noisy for m in self.countermeasures)

    def bounds(self, update: Tensors, number: int | None = None) -> constraints.Bounds:
        """Bound the undefended tensors of ``update`` by the first ``number`` rules; others are as observed."""
        rules = [m.rule for m in self.countermeasures[:number] if m.rule]
        std = self._noise_std(update) if rules else 0.0
        return constraints.widest(rule(update, std) for rule in rules)

    def _noise_std(self, update: Tensors) -> float:
        if not self.noise_stds:
            return 0.0
        told = [std for std in self.noise_stds if std is not None]
        most = constraints.estimate_noise_std(update)
        return min(most, math.hypot(*told)) if len(told) == len(self.noise_stds) else most

    def update_constraints(
        self, observations: Sequence[Observation], matched: Matched
    ) -> constraints.UpdateConstraints:
        updates = [o.update() for o in observations]
        clippings = [(number, m.clipping) for number, m in enumerate(self.countermeasures) if m.clipping]
        clipped = [matched(o) for o in observations] if clippings else []
        clips = []
        for number, clipping in clippings:  # the elements that countermeasures before it may have dropped count for 0
            each = [self.bounds(update, number) for update in updates]
            pairs = {name: [bounds[name] for bounds in each] for name in each[0]}
            kept = {n: torch.stack([1 - ((low < 0) & (high > 0)).float() for low, high in p]) for n, p in pairs.items()}
            clips.append(clipping.of(clipped, kept))
        each = [_in_matched_units(o, self.bounds(u), matched) for o, u in zip(observations, updates, strict=True)]
        low, high = ({name: torch.stack([bounds[name][end] for bounds in each]) for name in each[0]} for end in (0, 1))
        bounds = {name: (low[name], high[name]) for name in low}
        return constraints.UpdateConstraints(bounds=bounds, clip=constraints.Clips(tuple(clips)) if clips else None)


def _as_seen(parts: Description) -> Description:
    """Describe the effect of several clients' defenses on the mean of their updates: no clipping, and less noise."""
    number = math.prod(part.effect.clients for part in parts if isinstance(part.effect, Summed))
    if number == 1:
        return parts

    def of_mean(noise: Noise) -> Noise:
        return replace(noise, std=None if noise.std is None else noise.std / math.sqrt(number), clip=None)

    seen = []
    for part in (part for part in parts if not isinstance(part.effect, Clipped)):
        effect = of_mean(part.effect) if isinstance(part.effect, Noise) else part.effect
        if isinstance(effect, NoisedLayers):
            effect = replace(effect, added=effect.added and of_mean(effect.added))
        seen.append(replace(part, effect=effect))
    return tuple(seen)


def uncountered(parts: Description) -> list[str]:
    """Name the ``parts`` without a known countermeasure; they are attacked as if unknown."""
    unknown = countermeasures_against.dispatch(object)
    names = [part.name for part in parts if countermeasures_against.dispatch(type(part.effect)) is unknown]
    return list(dict.fromkeys(names))


def _taken(parts: Description, circumstances: Circumstances) -> list[Countermeasure]:
    return [taken for part in parts for taken in countermeasures_against(part.effect, circumstances) or ()]


def _noise_std(effect: Effect, circumstances: Circumstances) -> float | None:
    std, unit = None, 1.0 / circumstances.matched_per_uploaded
    if isinstance(effect, Noise) and effect.at == "upload":
        std, unit = effect.std, 1.0
    elif isinstance(effect, Noise | SlicedNoise) and not circumstances.unrolls:
        std = effect.std
    return None if std is None else std * unit


def _in_turn(transforms: Sequence[constraints.Transform], images: Tensor) -> Tensor:
    for transform in transforms:
        images = transform(images)
    return images


def _in_matched_units(observation: Observation, bounds: constraints.Bounds, matched: Matched) -> constraints.Bounds:
    plan = observation.plan
    plan = replace(plan, shares="delta") if plan.shares == "weights" else plan

    def convert(end: int) -> Tensors:
        tensors = {name: pair[end] for name, pair in bounds.items()}
        return matched(replace(observation, plan=plan, upload=replace(observation.upload, tensors=tensors)))

    ends = convert(0), convert(1)
    return {n: (torch.minimum(ends[0][n], ends[1][n]), torch.maximum(ends[0][n], ends[1][n])) for n in bounds}
