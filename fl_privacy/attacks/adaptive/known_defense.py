"""Which measures are taken against a defense that is known, and what they say of each victim."""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive.assumed_transform import Change
from fl_privacy.attacks.adaptive.bounds import Bounds, widest
from fl_privacy.attacks.adaptive.circumstances import Scene
from fl_privacy.attacks.adaptive.clip import Clips
from fl_privacy.attacks.adaptive.countermeasures import MEASURES, Measure
from fl_privacy.attacks.adaptive.description import parts
from fl_privacy.attacks.adaptive.hidden_gradient import Secret
from fl_privacy.types import Observation, Tensors

logger = logging.getLogger(__name__)

MOST_SEQUENCES = 1024
"""Of changes to an image that are tried one by one."""

Matched = Callable[[Observation], Tensors]
"""The tensors that an attack matches, made of what was uploaded."""


@dataclass(frozen=True, eq=False)
class Told:
    """What is known of V victims' updates.

    Attributes:
        bounds: (V, *shape) each, of the tensors that are not known exactly.
        clip: of the guessed gradients.
        smoothness: weight of total variation as a share of the loss of a zero gradient.
    """

    bounds: Bounds
    clip: Clips | None
    smoothness: float

    def to(self, device: torch.device, dtype: torch.dtype) -> "Told":
        """On ``device`` and in ``dtype``."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        bounds = {name: (move(low), move(high)) for name, (low, high) in self.bounds.items()}
        return Told(bounds, self.clip and self.clip.map(move), self.smoothness)


@dataclass(frozen=True)
class Counter:
    """Measures against one known defense.

    Attributes:
        measures: in the order of the defense's parts.
    """

    measures: tuple[Measure, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is done, and what of it can't be, for the report."""
        said = [measure.sentence for measure in self.measures]
        if self.secret and (others := {s.weight for s in self._secrets} - {self.secret.weight}):
            said.append(f"It leaves out what private heads send back elsewhere, before {', '.join(sorted(others))}.")
        if len(self.changes) < math.prod(self._numbers_of_changes):
            said.append(
                "It leaves out that several defenses change the image: they may do so in"
                f" {math.prod(self._numbers_of_changes)} ways together, of which it tries the {len(self.changes)} of"
                " the one with the most."
            )
        return tuple(dict.fromkeys(said))

    @property
    def secret(self) -> Secret | None:
        """What is guessed of private losses; ``None`` where there is none.

        Several that act on the same features add up to one unknown vector, in the unit of the strongest; of those that
        act on different ones it is the strongest that is guessed.
        """
        return max(self._secrets, key=lambda secret: secret.strength, default=None)

    @property
    def _secrets(self) -> list[Secret]:
        return [measure.secret for measure in self.measures if measure.secret]

    @property
    def loss_factor(self) -> float:
        """Of the cross entropy in the clients' loss."""
        return math.prod(measure.loss_factor for measure in self.measures)

    @property
    def changes(self) -> tuple[Change, ...]:
        """What the client may have done to its images; empty where it does nothing to them.

        Where several defenses change them it is every sequence of theirs, in their order, up to ``MOST_SEQUENCES``.
        """
        each = [measure.changes for measure in self.measures if measure.changes]
        if len(each) < 2 or math.prod(self._numbers_of_changes) > MOST_SEQUENCES:
            return max(each, key=len, default=())
        return tuple(partial(_in_turn, sequence) for sequence in itertools.product(*each))

    @property
    def _numbers_of_changes(self) -> list[int]:
        return [len(measure.changes) for measure in self.measures if measure.changes] or [0]

    def told(self, observations: Sequence[Observation], matched: Matched) -> Told:
        """What the measures say of ``observations``."""
        rules = [m.rule for m in self.measures if m.rule]
        clippings = [m.clipping for m in self.measures if m.clipping]
        clipped = [matched(o) for o in observations] if clippings else []
        bounds = [_in_matched_units(o, widest(rule(o.update()) for rule in rules), matched) for o in observations]
        return Told(
            {name: _stack([b[name] for b in bounds]) for name in bounds[0]},
            Clips(tuple(clipping.of(clipped) for clipping in clippings)) if clippings else None,
            max((m.smoothness for m in self.measures), default=0.0),
        )


def counter(observation: Observation, scene: Scene) -> Counter:
    """The measures against the defense that ``observation`` knows of; a line in the log on what there is none for."""
    measures = []
    for part in parts(observation.knowledge.defense or {}):
        if part.name in MEASURES:
            measures += MEASURES[part.name](part.settings, scene)
        else:
            logger.info("No measure is known against %s, which is attacked as if unknown.", part.name or "the defense")
    return Counter(tuple(measures))


def _in_turn(changes: Sequence[Change], images: Tensor) -> Tensor:
    for change in changes:
        images = change(images)
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
