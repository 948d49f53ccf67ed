"""Observations that one program can attack together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fl_privacy.attacks.gradient_inversion.rounds import Victim
from fl_privacy.types import ModelState, Observation


@dataclass(eq=False)
class Group:
    """Victims with the same model, values sent, plan, shapes and uploaded tensors.

    Attributes:
        members: (position in the caller's sequence, observation).
        earlier: the same victims, at the same positions, in each of the other rounds that are attacked with this one.
    """

    members: list[tuple[int, Observation]] = field(default_factory=list)
    earlier: list["Group"] = field(default_factory=list)

    @property
    def first(self) -> Observation:
        """A member, to read what all have in common."""
        return self.members[0][1]

    def takes(self, victim: Victim) -> bool:
        """Whether ``victim``, whose shapes fit, was sent the same values in all rounds."""
        rounds = [self.first, *(group.first for group in self.earlier)]
        pairs = zip(rounds, [victim.observation, *victim.earlier], strict=True)
        return all(
            _same_values(own.sent, other.sent) and _same_values(own.knowledge.private, other.knowledge.private)
            for own, other in pairs
        )

    def add(self, victim: Victim) -> None:
        """Take ``victim`` in."""
        self.members.append((victim.position, victim.observation))
        for group, observation in zip(self.earlier, victim.earlier, strict=True):
            group.members.append((victim.position, observation))


def group_victims(victims: Sequence[Victim]) -> list[Group]:
    """Each victim in exactly one group, in the order of first appearance."""
    candidates: dict[tuple[object, ...], list[Group]] = {}
    groups: list[Group] = []
    for victim in victims:
        alike = candidates.setdefault(tuple(_key(o) for o in (victim.observation, *victim.earlier)), [])
        group = next((g for g in alike if g.takes(victim)), None)
        if group is None:
            group = Group(earlier=[Group() for _ in victim.earlier])
            alike.append(group)
            groups.append(group)
        group.add(victim)
    return groups


def _key(observation: Observation) -> tuple[object, ...]:
    return (
        id(observation.model),
        observation.plan,
        observation.input_shape,
        observation.num_classes,
        observation.upload.num_examples,
        tuple(sorted(observation.upload.tensors)),
        repr(observation.knowledge.defense),
        None if observation.knowledge.labels is None else observation.knowledge.labels.dim(),
        observation.knowledge.features_at,
    )


def _same_values(one: ModelState | None, other: ModelState | None) -> bool:
    if one is other:
        return True
    if one is None or other is None:
        return False
    pairs = ((one.parameters, other.parameters), (one.buffers, other.buffers))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
