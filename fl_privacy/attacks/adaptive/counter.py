"""Which measures are taken against a defense that is known, and what they say of each victim."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive.bounds import Bounds, widest
from fl_privacy.attacks.adaptive.clip import Clip
from fl_privacy.attacks.adaptive.description import parts
from fl_privacy.attacks.adaptive.disguise import Change
from fl_privacy.attacks.adaptive.measures import MEASURES, Measure
from fl_privacy.attacks.adaptive.scene import Scene
from fl_privacy.attacks.adaptive.secret import Secret
from fl_privacy.types import Observation, Tensors

logger = logging.getLogger(__name__)

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
    clip: Clip | None
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
        """What is done, for the report."""
        return tuple(dict.fromkeys(measure.sentence for measure in self.measures))

    @property
    def secret(self) -> Secret | None:
        """What is guessed of a private loss; ``None`` where there is none."""
        return next((measure.secret for measure in self.measures if measure.secret), None)

    @property
    def loss_factor(self) -> float:
        """Of the cross entropy in the clients' loss."""
        return math.prod(measure.loss_factor for measure in self.measures)

    @property
    def changes(self) -> tuple[Change, ...]:
        """What the client may have done to its images; empty where it does nothing to them."""
        return next((measure.changes for measure in self.measures if measure.changes), ())

    def told(self, observations: Sequence[Observation], matched: Matched) -> Told:
        """What the measures say of ``observations``."""
        rules = [m.rule for m in self.measures if m.rule]
        clipping = next((m.clipping for m in self.measures if m.clipping), None)
        bounds = [_in_matched_units(o, widest(rule(o.update()) for rule in rules), matched) for o in observations]
        return Told(
            {name: _stack([b[name] for b in bounds]) for name in bounds[0]},
            None if clipping is None else clipping.of([matched(o) for o in observations]),
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
