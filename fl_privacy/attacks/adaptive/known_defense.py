"""A defense that is known: the countermeasures taken against it, and what they say of each victim."""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive.assumed_transform import Transform
from fl_privacy.attacks.adaptive.bounds import Bounds, widest
from fl_privacy.attacks.adaptive.clip import Clips
from fl_privacy.attacks.adaptive.constraints import HiddenGradient, UpdateConstraints
from fl_privacy.attacks.adaptive.countermeasures import Circumstances, Countermeasure, countermeasures_against
from fl_privacy.types import Observation, Tensors

logger = logging.getLogger(__name__)

MOST_SEQUENCES = 1024
"""Of transforms to an image that are tried one by one."""

Matched = Callable[[Observation], Tensors]
"""The tensors that an attack matches, made of what was uploaded."""


@dataclass(frozen=True)
class KnownDefense:
    """What is done against one known defense.

    Attributes:
        countermeasures: in the order of the defense's parts.
    """

    countermeasures: tuple[Countermeasure, ...] = ()

    @classmethod
    def of(cls, observation: Observation, circumstances: Circumstances) -> "KnownDefense":
        """That which ``observation`` knows of; a line in the log on what there is no countermeasure for."""
        found: list[Countermeasure] = []
        for part in observation.knowledge.defense or ():
            if (taken := countermeasures_against(part.effect, circumstances)) is None:
                logger.info("No countermeasure is known against %s, which is attacked as if unknown.", part.name)
            else:
                found += taken
        return cls(tuple(found))

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is done, and what of it can't be, for the report."""
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
    def hidden(self) -> HiddenGradient | None:
        """What is guessed of private losses; ``None`` where there is none.

        Several that act on the same features add up to one unknown vector, in the unit of the strongest; of those that
        act on different ones it is the strongest that is guessed.
        """
        return max(self._hidden, key=lambda hidden: hidden.strength, default=None)

    @property
    def _hidden(self) -> list[HiddenGradient]:
        return [countermeasure.hidden for countermeasure in self.countermeasures if countermeasure.hidden]

    @property
    def loss_factor(self) -> float:
        """Of the cross entropy in the clients' loss."""
        return math.prod(countermeasure.loss_factor for countermeasure in self.countermeasures)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """What the client may have done to its images; empty where it does nothing to them.

        Where several defenses change them it is every sequence of theirs, in their order, up to ``MOST_SEQUENCES``.
        """
        each = [countermeasure.transforms for countermeasure in self.countermeasures if countermeasure.transforms]
        if len(each) < 2 or math.prod(self._numbers_of_transforms) > MOST_SEQUENCES:
            return max(each, key=len, default=())
        return tuple(partial(_in_turn, sequence) for sequence in itertools.product(*each))

    @property
    def _numbers_of_transforms(self) -> list[int]:
        return [
            len(countermeasure.transforms) for countermeasure in self.countermeasures if countermeasure.transforms
        ] or [0]

    @property
    def smoothness(self) -> float:
        """Weight of total variation in units of ``Problem.blank_loss``, of one round."""
        return max((m.smoothness for m in self.countermeasures), default=0.0)

    @property
    def noisy(self) -> bool:
        """Whether smoothness follows from the noise in the updates, of which all values are known."""
        return any(m.noisy for m in self.countermeasures) and not any(m.rule for m in self.countermeasures)

    def update_constraints(self, observations: Sequence[Observation], matched: Matched) -> UpdateConstraints:
        """What the countermeasures say of the updates of ``observations``."""
        rules = [m.rule for m in self.countermeasures if m.rule]
        clippings = [m.clipping for m in self.countermeasures if m.clipping]
        clipped = [matched(o) for o in observations] if clippings else []
        bounds = [_in_matched_units(o, widest(rule(o.update()) for rule in rules), matched) for o in observations]
        return UpdateConstraints(
            bounds={name: _stack([b[name] for b in bounds]) for name in bounds[0]},
            clip=Clips(tuple(clipping.of(clipped) for clipping in clippings)) if clippings else None,
        )


def _in_turn(transforms: Sequence[Transform], images: Tensor) -> Tensor:
    for transform in transforms:
        images = transform(images)
    return images


def _in_matched_units(observation: Observation, bounds: Bounds, matched: Matched) -> Bounds:
    plan = observation.plan
    plan = replace(plan, shares="delta") if plan.shares == "weights" else plan

    def convert(end: int) -> Tensors:
        tensors = {name: pair[end] for name, pair in bounds.items()}
        return matched(replace(observation, plan=plan, upload=replace(observation.upload, tensors=tensors)))

    ends = convert(0), convert(1)
    return {n: (torch.minimum(ends[0][n], ends[1][n]), torch.maximum(ends[0][n], ends[1][n])) for n in bounds}


def _stack(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([low for low, _ in pairs]), torch.stack([high for _, high in pairs])
