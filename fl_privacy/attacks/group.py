"""Observations that one program can attack together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fl_privacy.types import ModelState, Observation


@dataclass(eq=False)
class Group:
    """Victims with the same model, values sent, plan, shapes and uploaded tensors.

    Attributes:
        members: (position in the caller's sequence, observation).
    """

    members: list[tuple[int, Observation]] = field(default_factory=list)

    @property
    def first(self) -> Observation:
        """A member, to read what all have in common."""
        return self.members[0][1]


def group_observations(observations: Sequence[tuple[int, Observation]]) -> list[Group]:
    """Each observation in exactly one group, in the order of first appearance."""
    candidates: dict[tuple[object, ...], list[Group]] = {}
    groups: list[Group] = []
    for position, observation in observations:
        alike = candidates.setdefault(_key(observation), [])
        group = next((g for g in alike if _same_values(g.first.sent, observation.sent)), None)
        if group is None:
            group = Group()
            alike.append(group)
            groups.append(group)
        group.members.append((position, observation))
    return groups


def _key(observation: Observation) -> tuple[object, ...]:
    return (
        id(observation.model),
        observation.plan,
        observation.input_shape,
        observation.num_classes,
        observation.upload.num_examples,
        tuple(sorted(observation.upload.tensors)),
    )


def _same_values(one: ModelState, other: ModelState) -> bool:
    if one is other:
        return True
    pairs = ((one.parameters, other.parameters), (one.buffers, other.buffers))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
