"""Group observations for joint attacks, and join updates of the same examples."""

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fl_privacy.attacks.attack import Report, even_share, within
from fl_privacy.attacks.gradient_inversion.infer_client import disclosed, restored
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, why_not_attackable
from fl_privacy.attacks.pixel_prior import FEWEST, PixelPrior, learn_prior
from fl_privacy.effects import Effect, Mixed, mixing
from fl_privacy.errors import in_one_line, is_out_of_memory
from fl_privacy.models.unwrap_model import without_checkpointing
from fl_privacy.progress import Progress, counted, no_progress
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, Certainty, ModelState, Observation, Reconstruction, Upload

_TURNS, _DOUBTFUL, _LEAST_DOUBT = 30, 20, 0.05
"""Number of turns that estimate signs and image alternately; number of turns over which the image's extra uncertainty
falls; and its last value, as a share of the prior variance."""

_LEAST_SHARE, _LEAST_VARIANCE = 1e-3, 1e-3  # least share of an image in its mixture, and least variance of a pixel


def as_mixture(observation: Observation) -> Observation:
    """Return ``observation`` as if the defense mixed no images, so that attacks reconstruct the mixed image."""
    known = observation.knowledge
    if mixing(known.defense) is None:
        return observation
    others = tuple(part for part in known.defense or () if not isinstance(part.effect, Mixed))
    return observation.given(defense=others, same_data=None)


def unmixed(observations: Sequence[Observation], found: Sequence[Reconstruction]) -> list[Reconstruction]:
    """Replace reconstructed image mixtures (InstaHide) of the same example by the image that they have in common.

    A reconstruction stays unchanged if its upload holds several examples, or the attacker has no public images or does
    not know that the defense mixes.
    """
    together: dict[object, list[int]] = {}
    for place, (observation, own) in enumerate(zip(observations, found, strict=True)):
        public = observation.knowledge.public_images
        enough = public is not None and public.dim() == 4 and len(public) >= FEWEST
        alone = own.batch is not None and observation.upload.num_examples == 1
        if enough and alone and mixing(observation.knowledge.defense) is not None:
            name = observation.knowledge.same_data
            together.setdefault(place if name is None else name, []).append(place)
    results = list(found)
    for places in together.values():
        observation = observations[places[-1]]
        batch = common_image(observation, [batch for place in places if (batch := found[place].batch) is not None])
        mixtures = "a mixture" if len(places) == 1 else f"{len(places)} mixtures with the same image, together"
        sentence = f"It undoes the signs of {mixtures} by what public images look like."
        for place in places:
            results[place] = replace(
                found[place],
                batch=batch,
                certainty=Certainty.APPROXIMATE,
                certainties=(),
                member="unmixed",
                countermeasures=(*found[place].countermeasures, sentence),
            )
    return results


@torch.no_grad()
def common_image(observation: Observation, mixtures: Sequence[Batch]) -> Batch:
    """Find the image that ``mixtures`` of one example have in common, and its label, by expectation maximization.

    A mixture is a weighted sum of images, (1, C, H, W) in [0, 1], with labels (1,) or (1, K); some of its pixels may be
    negated. Public images give a prior.
    """
    known, effect = observation.knowledge, mixing(observation.knowledge.defense)
    assert known.public_images is not None and effect is not None
    prior = learn_prior(known.public_images, known.public_labels, observation.num_classes)
    labels = [batch.labels[0] for batch in mixtures]
    hot = [one if one.dim() else torch.nn.functional.one_hot(one, observation.num_classes) for one in labels]
    shares = torch.stack([one.float().cpu() for one in hot]).to(prior.means)
    labeled = min(1.0, (effect.labeled or 1) / (effect.images or effect.labeled or 1))
    label = shares.sum(0).argmax()
    own = (labeled * shares[:, label]).clamp_min(_LEAST_SHARE)
    if (effect.images or 2) > 1 and bool((shares.amax(1) > 1 - _LEAST_SHARE).all()):
        own = torch.full_like(own, 1 / (effect.images or 2))  # a label of one class shows no shares
    seen = torch.stack([batch.inputs[0].flatten() for batch in mixtures]).to(prior.means)
    others = labeled * shares.clone()
    others[:, label] = 0
    image = _estimated_image(seen, own, others, prior, label)
    shape = mixtures[0].inputs.shape
    return Batch(image.clamp(0, 1).view(shape).to(mixtures[0].inputs), label[None].to(mixtures[0].inputs.device))


def _estimated_image(seen: Tensor, own: Tensor, others: Tensor, prior: PixelPrior, label: Tensor) -> Tensor:
    rest = (1 - own - others.sum(1)).clamp_min(0)
    expected_others = others @ prior.of(torch.arange(others.shape[1]))[0] + rest[:, None] * prior.means.mean(0)
    means, which = prior.of(label)
    basis = prior.bases[which]
    before = after = basis.square().sum(0)  # variance of each pixel
    of_others = prior.bases.square().sum(1).mean(0) + _LEAST_VARIANCE
    power = (others.square().sum(1) + rest.square())[:, None]
    image = means
    for turn in range(_TURNS):
        expected = own[:, None] * image + expected_others
        doubt = after + before * max(_LEAST_DOUBT, 1 - turn / _DOUBTFUL)
        variance = power * of_others + own[:, None].square() * doubt + _LEAST_VARIANCE
        turned = torch.sigmoid(((seen - expected).square() - (1 - seen - expected).square()) / (2 * variance))
        unturned = torch.lerp(seen, 1 - seen, turned)
        unsure = (turned * (1 - turned) * (2 * seen - 1).square()).mean(0)
        noise = power * of_others.mean() + unsure + _LEAST_VARIANCE
        precision = (own[:, None].square() / noise).sum(0)
        view = (own[:, None] * (unturned - expected_others) / noise).sum(0)
        factor = torch.linalg.cholesky(torch.eye(len(basis)).to(basis) + (basis * precision) @ basis.T)
        image = means + torch.cholesky_solve((basis @ (view - precision * means))[:, None], factor)[:, 0] @ basis
        after = torch.linalg.solve_triangular(factor, basis, upper=False).square().sum(0)
    return image


logger: logging.Logger = logging.getLogger(__name__)

UNFORESEEN = (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError)
"""Errors that one victim's numbers can cause: in factorizations, empty sets of candidates or shapes."""


@dataclass(frozen=True, eq=False)
class Victim:
    """Updates of the same examples, attacked together: the last one, ``observation``, and ``earlier`` ones."""

    position: int  # index of the last update in the caller's list
    observation: Observation
    earlier: tuple[Observation, ...] = ()
    positions: tuple[int, ...] = ()  # indices of all updates

    @property
    def kinds(self) -> tuple[object, ...]:
        found = list[tuple[object, ...]]()
        for one in (self.observation, *self.earlier):
            known, tensors = one.knowledge, tuple(sorted(one.upload.tensors))
            labels = None if known.labels is None else known.labels.dim()
            knowledge = repr(known.defense), labels, known.features_at, known.bounds is None
            shapes = one.input_shape, one.num_classes, one.upload.num_examples, tensors
            found.append((id(one.model), one.plan, one.loss, *shapes, *knowledge))
        return tuple(found)


def victims_of(observations: Iterable[tuple[int, Observation]]) -> list[Victim]:
    """Turn observations into victims; those of the same examples become one victim if their defense is known."""
    together: dict[object, list[tuple[int, Observation]]] = {}
    for position, observation in observations:
        known = observation.knowledge
        joins = known.same_data is not None and known.defense is not None
        shape = (observation.upload.num_examples, observation.input_shape, observation.num_classes)
        together.setdefault((known.same_data, *shape) if joins else position, []).append((position, observation))
    unzipped = (zip(*rounds, strict=True) for rounds in together.values())
    return [Victim(places[-1], seen[-1], seen[:-1], places) for places, seen in unzipped]


@dataclass(eq=False)
class Group:
    """Victims that one batched computation attacks: same model, sent values, training plan, shapes and tensors."""

    observations: dict[int, Observation] = field(default_factory=dict)  # last updates, by index in the caller's list
    earlier: list["Group"] = field(default_factory=list)  # the same victims' updates of earlier rounds

    @property
    def first(self) -> Observation:
        return next(iter(self.observations.values()))

    def takes(self, victim: Victim) -> bool:
        rounds = [self.first, *(group.first for group in self.earlier)]
        return all(
            _same_values(own.sent, other.sent)
            and _same_values(own.knowledge.private, other.knowledge.private)
            and _same_values(own.knowledge.front, other.knowledge.front)
            for own, other in zip(rounds, [victim.observation, *victim.earlier], strict=True)
        )

    def only(self, positions: Iterable[int]) -> "Group":
        positions = list(positions)
        return Group({p: self.observations[p] for p in positions}, [one.only(positions) for one in self.earlier])

    def add(self, victim: Victim) -> None:
        self.observations[victim.position] = victim.observation
        for group, observation in zip(self.earlier, victim.earlier, strict=True):
            group.observations[victim.position] = observation


def group_victims(victims: Sequence[Victim]) -> list[Group]:
    """Return groups of victims that can be attacked together, in the order of first appearance."""
    candidates: dict[tuple[object, ...], list[Group]] = {}
    groups: list[Group] = []
    for victim in victims:
        alike = candidates.setdefault(victim.kinds, [])
        group = next((g for g in alike if g.takes(victim)), None)
        if group is None:
            group = Group(earlier=[Group() for _ in victim.earlier])
            alike.append(group)
            groups.append(group)
        group.add(victim)
    return groups


Rounds = Literal["joined", "last", "apart"]

_UNUSED = dict.fromkeys(["knowledge", "defense", "same_data"])
_results = WeakKeyDictionary[Upload, dict[type, Any]]()
"""By a group's first upload and the attack's class: what was asked, all that was used, and results."""


class Groups:
    """Iterable of groups of observations to attack together; ``results`` collects reconstructions by index.

    After an unforeseen error (:data:`UNFORESEEN`), a group is attacked again, one victim at a time.

    Args:
        progress: callback (done, total) for the work, of which each victim counts 1000.
        rounds: treatment of several updates of the same examples: ``joined`` attacks them together, ``last`` only the
            last, ``apart`` each by itself.
        wrong: function that returns the reason why an observation can't be attacked, or ``None``.
        see: function that changes the observations before the attack, such as to enter inferred defenses.
    """

    @without_checkpointing()
    def __init__(
        self,
        observations: Sequence[Observation],
        *,
        progress: Progress,
        rounds: Rounds = "joined",
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
        """Record a failure of the attack on ``group`` in this context; yield a callback for the share of work done."""
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

    def attacked(self, attack: Callable[[Group, Report], dict[int, Reconstruction]]) -> list[Reconstruction]:
        for group in self:
            with self.attempt(group) as report:
                self.results |= attack(group, report)
        return self.reconstructions()

    @without_checkpointing()
    def reconstructions(self) -> list[Reconstruction]:
        for victim in self._victims:
            for position in victim.positions:
                self.results[position] = replace(self.results[victim.position], id=self._seen[position].id)
        pairs = enumerate(zip(self._asked, self._known, strict=True))
        return unmixed(self._asked, [restored(asked, known, self.results[p]) for p, (asked, known) in pairs])


Solve = Callable[[Group, int, Report], dict[int, Reconstruction]]


class GroupAttack(ABC):
    """Base of attacks that reconstruct one group of victims at a time (:meth:`solve`); see :class:`Groups`."""

    of_rounds: ClassVar[Rounds] = "joined"

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        groups = Groups(observations, progress=progress, rounds=self.of_rounds, wrong=self.wrong, see=self.see)
        return groups.attacked(lambda group, report: self.solve(group, seed, report))

    def wrong(self, observation: Observation) -> str | None:
        return why_not_attackable(observation)

    def see(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        return observations

    def solved_once(
        self, solve: Solve, group: Group, seed: int, report: Report, *, used: Sequence[Effect] = ()
    ) -> dict[int, Reconstruction]:
        """Return ``solve(group, seed, report)``, computed once for attackers who differ only in the defense they know.

        ``used``: effects of that defense on which results depend, and which must be the same.
        """
        upload, of = group.first.upload, group.observations
        facts = [fact for o in of.values() for fact in (vars(o) | vars(o.knowledge) | _UNUSED).values()]
        kept, asked = _results.setdefault(upload, {}), (self, seed, [*of], [*map(id, facts)], [*used])
        if type(self) not in kept or kept[type(self)][0] != asked:
            with within(math.inf) as limit:
                results = solve(group, seed, report)
            if limit.cut:
                return results
            others = [fact for fact in facts if fact is not upload]  # kept, so that no other object gets their ids
            kept[type(self)] = asked, others, results
        report(1.0)
        return dict(kept[type(self)][2])

    @abstractmethod
    def solve(self, group: Group, seed: int, report: Report) -> dict[int, Reconstruction]:
        """Return reconstructions of ``group``, keyed as its observations are, or raise ``NotAttackableError``."""


def failed(observation: Observation, reason: str) -> Reconstruction:
    """Return a failed reconstruction with its ``reason``."""
    return Reconstruction(id=observation.id, batch=None, failure=reason)


def broke_off(observation: Observation, error: Exception) -> Reconstruction:
    """Return a failed reconstruction for an unexpected ``error``; raise it if memory ran out."""
    if is_out_of_memory(error):
        raise error
    logger.debug("The attack on %s broke off.", observation.id, exc_info=error)
    return failed(observation, f"The attack broke off by an error of its own: {in_one_line(error)}.")


Reading = Callable[[Observation, torch.Generator, Report], Reconstruction]
"""(observation, its random stream, report of progress) -> reconstruction."""


def read_group(group: Group, read: Reading, *, name: str, seed: int, report: Report) -> dict[int, Reconstruction]:
    """Reconstruct each victim of ``group`` by ``read``; return results, keyed as the group's observations are.

    ``name``: attack's name for progress and random streams. ``report``: callback for the share of work done.
    """
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
    """Raise ``NotAttackableError`` unless the update is a gradient or sum of gradients; Adam's steps are not."""
    of_adam = observation.plan.shares != "gradient" and observation.plan.optimizer != "sgd"
    if of_adam or observation.knowledge.bounds is not None:
        raise NotAttackableError("A gradient or steps of SGD are expected, but got steps of Adam; use attack=auto.")


def without_labels(observation: Observation) -> Reconstruction:
    """Return a failed reconstruction for an update without the output layer's gradient."""
    return failed(
        observation,
        "The output layer's gradient is expected, but there is none; give the labels (threat_model=knows_labels).",
    )


def _same_values(one: ModelState | None, other: ModelState | None) -> bool:
    if one is other:
        return True
    if one is None or other is None:
        return False
    pairs = ((one.parameters, other.parameters), (one.buffers, other.buffers))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
