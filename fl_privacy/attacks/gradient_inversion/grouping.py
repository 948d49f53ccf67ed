"""Attack many observations in groups."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fl_privacy.attacks.attack import Progress, Report, even_share
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError, why_not_attackable
from fl_privacy.attacks.gradient_inversion.infer_client import disclosed, restored
from fl_privacy.attacks.gradient_inversion.unmixing import as_mixture, unmixed
from fl_privacy.errors import in_one_line, is_out_of_memory
from fl_privacy.models.unwrap_model import without_checkpointing
from fl_privacy.progress import counted
from fl_privacy.rng import derive_generator
from fl_privacy.types import ModelState, Observation, Reconstruction

logger = logging.getLogger(__name__)

UNFORESEEN = (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError)
"""Errors that one victim's numbers can cause: in factorizations, empty sets of candidates or shapes."""


@dataclass(frozen=True, eq=False)
class Victim:
    """The observations from which one victim's examples are reconstructed together.

    Attributes:
        position: place of ``observation``, the last update, in the caller's sequence.
        earlier: updates before it from the same examples.
        positions: places of all of them.
    """

    position: int
    observation: Observation
    earlier: tuple[Observation, ...] = ()
    positions: tuple[int, ...] = ()


def victims_of(observations: Iterable[tuple[int, Observation]]) -> list[Victim]:
    """Make one victim of each observation, or of those known to come from the same examples.

    Only attackers that know the defense join rounds, as an adaptive attacker does.
    """
    together: dict[object, list[tuple[int, Observation]]] = {}
    for position, observation in observations:
        known = observation.knowledge
        joins = known.same_data is not None and known.defense is not None
        shape = (observation.upload.num_examples, observation.input_shape, observation.num_classes)
        name = (known.same_data, *shape) if joins else position
        together.setdefault(name, []).append((position, observation))
    unzipped = (zip(*rounds, strict=True) for rounds in together.values())
    return [Victim(places[-1], seen[-1], seen[:-1], places) for places, seen in unzipped]


@dataclass(eq=False)
class Group:
    """Victims with the same model, values sent, plan, shapes and uploaded tensors.

    Attributes:
        earlier: the same victims in each other round that is attacked with this one.
    """

    observations: dict[int, Observation] = field(default_factory=dict)
    earlier: list["Group"] = field(default_factory=list)

    @property
    def first(self) -> Observation:
        return next(iter(self.observations.values()))

    def takes(self, victim: Victim) -> bool:
        rounds = [self.first, *(group.first for group in self.earlier)]
        pairs = zip(rounds, [victim.observation, *victim.earlier], strict=True)
        return all(
            _same_values(own.sent, other.sent)
            and _same_values(own.knowledge.private, other.knowledge.private)
            and _same_values(own.knowledge.front, other.knowledge.front)
            for own, other in pairs
        )

    def only(self, positions: Iterable[int]) -> "Group":
        positions = list(positions)
        return Group({p: self.observations[p] for p in positions}, [one.only(positions) for one in self.earlier])

    def add(self, victim: Victim) -> None:
        self.observations[victim.position] = victim.observation
        for group, observation in zip(self.earlier, victim.earlier, strict=True):
            group.observations[victim.position] = observation


def group_victims(victims: Sequence[Victim]) -> list[Group]:
    """Put each victim into one group, in the order of first appearance."""
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


class Groups:
    """Groups of observations, and the reconstructions of their attacks.

    A victim with an unforeseen error (:data:`UNFORESEEN`) fails alone: its group comes again, one victim at a time::

        groups = Groups(observations, progress=progress)
        for group in groups:
            with groups.attempt(group) as report:
                groups.results |= attack(group, report)
        return groups.reconstructions()

    Args:
        progress: callback, a thousand parts for each victim.
        rounds: updates of the same examples are attacked together (``joined``), by the last one (``last``), or each
            alone (``apart``).
        wrong: reason why an observation can't be attacked, or ``None``.
        see: change of the observations after undisclosed parts were inferred.

    Attributes:
        results: reconstructions by position.
    """

    @without_checkpointing()
    def __init__(
        self,
        observations: Sequence[Observation],
        *,
        progress: Progress,
        rounds: Literal["joined", "last", "apart"] = "joined",
        wrong: Callable[[Observation], str | None] = why_not_attackable,
        see: Callable[[Sequence[Observation]], Sequence[Observation]] = list,
    ) -> None:
        self._asked, self._progress = observations, progress
        self._known = disclosed(list(map(as_mixture, observations)))
        self._seen = see([one.observation for one in self._known])
        reasons = {position: self._known[position].wrong or wrong(o) for position, o in enumerate(self._seen)}
        self.results = {p: failed(self._seen[p], reason) for p, reason in reasons.items() if reason is not None}
        sound = [(p, o) for p, o in enumerate(self._seen) if p not in self.results]
        self._victims = victims_of(sound) if rounds != "apart" else [Victim(p, o, (), (p,)) for p, o in sound]
        victims = [replace(one, earlier=()) for one in self._victims] if rounds == "last" else self._victims
        self._left = deque(group_victims(victims))
        self._done, self._total = 0, 1000 * len(victims)

    def __iter__(self) -> Iterator[Group]:
        while self._left:
            yield self._left.popleft()

    @contextmanager
    def attempt(self, group: Group) -> Iterator[Report]:
        """Attack ``group`` in this context, with a report of the share of the work done.

        After ``NotAttackableError`` its victims fail, after another error of theirs each is attacked alone.
        """
        before, size = self._done, 1000 * len(group.observations)
        try:
            with without_checkpointing():
                yield lambda share: self._progress(before + int(share * size), self._total)
        except NotAttackableError as reason:
            self.results |= {position: failed(o, str(reason)) for position, o in group.observations.items()}
        except UNFORESEEN as error:
            broken = broke_off(group.first, error)  # raises errors that are not a victim's own
            if len(group.observations) > 1:
                self._left.extendleft([group.only([position]) for position in group.observations][::-1])
                return
            self.results |= dict.fromkeys(group.observations, broken)
        self._done += size
        self._progress(self._done, self._total)

    @without_checkpointing()
    def reconstructions(self) -> list[Reconstruction]:
        """Return the reconstruction of each observation, in order."""
        for victim in self._victims:
            for position in victim.positions:
                self.results[position] = replace(self.results[victim.position], id=self._seen[position].id)
        pairs = enumerate(zip(self._asked, self._known, strict=True))
        return unmixed(self._asked, [restored(asked, known, self.results[p]) for p, (asked, known) in pairs])


def failed(observation: Observation, reason: str) -> Reconstruction:
    """Return a reconstruction without a guess, with the reason."""
    return Reconstruction(id=observation.id, batch=None, failure=reason)


def broke_off(observation: Observation, error: Exception) -> Reconstruction:
    """Return a failed reconstruction after an unforeseen ``error``.

    Raises:
        Exception: ``error``, if memory ran out.
    """
    if is_out_of_memory(error):
        raise error
    logger.debug("The attack on %s broke off.", observation.id, exc_info=error)
    return failed(observation, f"The attack broke off by an error of its own: {in_one_line(error)}.")


Reading = Callable[[Observation, torch.Generator, Report], Reconstruction]
"""(observation, its random stream, report of the share of the work done) -> its reconstruction."""


def read_group(group: Group, read: Reading, *, name: str, seed: int, report: Report) -> dict[int, Reconstruction]:
    """Reconstruct each of a group, by position, by an attack without descent."""
    results, total = dict[int, Reconstruction](), len(group.observations)
    for position, observation in counted(name, list(group.observations.items())):

        def meter(part: float) -> None:
            report((len(results) + part) / total)

        rng = derive_generator(seed, name, str(observation.id))
        try:
            with even_share(total - len(results)):
                results[position] = read(observation, rng, meter)
        except NotAttackableError as reason:
            results[position] = failed(observation, str(reason))
        except UNFORESEEN as error:
            results[position] = broke_off(observation, error)
        meter(0.0)
    return results


def expect_gradient(observation: Observation) -> None:
    """Check that the update is a gradient or a sum of gradients.

    Raises:
        NotAttackableError: it comes from Adam.
    """
    of_adam = observation.plan.shares != "gradient" and observation.plan.optimizer != "sgd"
    if of_adam or observation.knowledge.bounds is not None:
        raise NotAttackableError("A gradient or steps of SGD are expected, but the clients' are of Adam.")


def without_labels(observation: Observation) -> Reconstruction:
    """Return a failed reconstruction without a gradient to infer labels from."""
    return failed(observation, "The output layer's gradient is expected, to infer labels from, but there is none.")


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
        observation.knowledge.bounds is None,
        observation.loss,
    )


def _same_values(one: ModelState | None, other: ModelState | None) -> bool:
    if one is other:
        return True
    if one is None or other is None:
        return False
    pairs = ((one.parameters, other.parameters), (one.buffers, other.buffers))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
