"""``attack=auto`` for texts and table rows: exact solutions if possible, else the best descent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fl_privacy.attacks.attack import Limit, part_of_work, seconds_left, within
from fl_privacy.attacks.auto.sub_attacks import EVALUATIONS, LEAST, SOLVED, evaluations_in_time
from fl_privacy.attacks.exact import ExactInversion
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent
from fl_privacy.attacks.gradient_inversion import GradientInversion, evident_defense, settings, targets
from fl_privacy.attacks.gradient_inversion.labels import policy_for
from fl_privacy.attacks.likelihood.rows import LikeliestRows
from fl_privacy.attacks.likelihood.texts import MEMBER, LikeliestText, is_drowned, why_not_searched
from fl_privacy.attacks.presets import inverting_gradients, lamp, tableak, tag
from fl_privacy.attacks.text import BagOfWords, Dager
from fl_privacy.effects import Noise, Quantized
from fl_privacy.progress import Progress, counted
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction
from fl_privacy.types.schema import schema_of

_SHOWN_OF_TEXTS, _SHOWN_OF_ROWS = 0.1, 0.5
"""Shares of the progress bar for exact solutions; for rows, a failing search takes about as long as TabLeak."""

_ATTEMPTS = 10  # attempts at a table, which are pooled
_BEFORE_SEARCH = 1 / 8  # share of the descents' work on a single text if the likeliest is searched for

TAG_RATE, TAG_DECAY = 0.2, 0.05
"""TAG's learning rate and weight decay, above the preset's: decaying embeddings reach words sooner."""

ORDERED = settings.Rearranging(tries=100, last=6)
"""Settings of the search for the word order, which uses the gradient and, if there are any, public texts."""


@dataclass(frozen=True, kw_only=True)
class _Members:
    """Base of ``attack=auto`` for texts and table rows."""

    evaluations: int | None  # evaluations of the loss for each victim; ``None``: as many as there is time for
    device: str | None = None
    most_victims: int | None = None

    def _placed(self, attack: GradientInversion) -> GradientInversion:
        return replace(attack, device=self.device, most_victims=self.most_victims)


class TextMembers(_Members):
    """Attack on texts that runs several attacks and keeps the result whose gradient is nearest to the update.

    The attacks are DAGER (exact), bag of words, gradient descents and a search for the word order. For defended
    updates, a search for the likeliest text under the noise follows, which also starts from that result. If the update
    of a single text is mostly noise, descents run only if this search fails.
    """

    def __call__(self, observations: Sequence[Observation], *, seed: int, progress: Progress) -> list[Reconstruction]:
        bags = BagOfWords()(observations, seed=seed)
        with within(SOLVED * seconds_left()) as limit:
            exact = Dager()(observations, seed=seed, progress=part_of_work(progress, 0.0, _SHOWN_OF_TEXTS))
        best = [replace(one, member="dager") for one in exact]
        left = [k for k, one in enumerate(best) if one.certainty is Certainty.APPROXIMATE]
        seen = _with_inferred_noise([observations[k] for k in left])
        unsure = {k: one for k, one in zip(left, seen, strict=True) if one and not why_not_searched(one)}
        single = [k for k, one in unsure.items() if one.upload.num_examples == 1]
        shown, part = 0.0, 1 / (1 + bool(unsure))
        drowned = [k for k in single if is_drowned(unsure[k])]
        for k in drowned:
            best[k] = best[k] if bags[k].batch is None else replace(bags[k], member="bag of words")
        left, single = ([k for k in own if k not in drowned] for own in (left, single))
        for among, share in (([k for k in left if k not in single], 1.0), (single, _BEFORE_SEARCH)):
            if among:
                until = shown + share * part * len(among) / len(left)
                said, shown = part_of_work(progress, shown, until), until
                with within(seconds_left() * (share if among is single else part * len(among) / len(left))):
                    self._descend(observations, best, bags, limit, among=among, share=share, seed=seed, progress=said)
        attack = LikeliestText(evaluations=self.evaluations or EVALUATIONS["standard"], device=self.device)
        unsure = {k: one for k, one in unsure.items() if best[k].certainty is Certainty.APPROXIMATE}
        starts = [
            one if (own := best[k].batch) is None else one.given(previous=own.inputs) for k, one in unsure.items()
        ]
        found = attack(starts, seed=seed, progress=part_of_work(progress, shown, 1.0)) if starts else []
        for k, other in zip(unsure, found, strict=True):
            best[k] = best[k] if other.batch is None else other
        if unsearched := [
            k for k in drowned if best[k].member != MEMBER and best[k].certainty is Certainty.APPROXIMATE
        ]:
            self._descend(
                observations, best, bags, limit, among=unsearched, share=_BEFORE_SEARCH, seed=seed, progress=progress
            )
        for k, (one, bag) in enumerate(zip(best, bags, strict=True)):
            sure = one.batch is not None and one.certainty is not Certainty.APPROXIMATE
            words = one.batch.inputs[one.batch.inputs >= 0].cpu() if one.batch is not None and sure else bag.words
            best[k] = replace(one, words=words, words_exact=sure or bag.words_exact)
        return best

    def _descend(
        self,
        observations: Sequence[Observation],
        best: list[Reconstruction],
        bags: Sequence[Reconstruction],
        limit: Limit,
        *,
        among: Sequence[int],
        share: float,
        seed: int,
        progress: Progress,
    ) -> None:
        """Run gradient descents on the observations ``among``; replace results in ``best`` by those that fit better.

        ``bags``: bag-of-words results, which also replace those in ``best`` if they fit better. ``limit``: time limit
        of the exact attack, to log whether it was cut. ``share``: share of the evaluations to spend here.
        """
        asked, apart = [], dict[int, float]()
        for k in among:  # descents start from the words of a whole bag
            seen, bag = observations[k], bags[k].batch
            if bag is not None:
                outside = best[k].batch is None or not _within_bag(best[k], bags[k])
                if outside or _text_apart(seen, bags[k]) < _text_apart(seen, best[k]):
                    best[k] = replace(bags[k], member="bag of words")
            whole = bag is not None and len(bag.inputs) == seen.upload.num_examples
            asked.append(seen.given(previous=bag.inputs) if bag is not None and whole else seen)
            apart[k] = _text_apart(seen, best[k])
        evaluations = self.evaluations and math.ceil(share * self.evaluations)
        evaluations = evaluations or evaluations_in_time(
            lambda number: self._members(2 * number, asked[0])["tag"](asked, seed=seed), len(asked), cut=limit.cut
        )
        members = self._members(evaluations, asked[0])
        part = (1 - _SHOWN_OF_TEXTS) / len(members)
        for number, (name, member) in enumerate(members.items()):
            shown = part_of_work(progress, _SHOWN_OF_TEXTS + number * part, _SHOWN_OF_TEXTS + (number + 1) * part)
            (reached,) = (member(asked, seed=seed, progress=shown) for _ in counted(name, [name]))
            for k, found in zip(among, reached, strict=True):
                if best[k].batch is not None and not _within_bag(found, bags[k]):
                    continue
                distance = _text_apart(observations[k], found)
                if distance < apart[k] or (best[k].batch is None and found.batch is not None):
                    sure = Certainty.CONSISTENT if distance < ROUNDING else Certainty.APPROXIMATE
                    by = f"{name} from the words" if bags[k].batch is not None else name
                    best[k], apart[k] = replace(found, member=by, certainty=sure), distance

    def _members(self, evaluations: int, first: Observation) -> dict[str, GradientInversion]:
        prior = 0.0 if first.knowledge.public_images is None else ORDERED.prior
        each, labels = max(1, evaluations // 2), policy_for(first)
        attacks = {
            "tag": tag(iterations=each, lr=TAG_RATE, weight_decay=TAG_DECAY),
            "inverting gradients": inverting_gradients(iterations=each),
            "order of words": replace(lamp(iterations=1), moves=replace(ORDERED, prior=prior)),
        }
        return {name: self._placed(replace(attack, labels=labels)) for name, attack in attacks.items()}


def _within_bag(found: Reconstruction, bag: Reconstruction) -> bool:
    if bag.words is None or not bag.words_exact or found.batch is None:
        return True
    tokens = found.batch.inputs
    return bool(torch.isin(tokens[tokens >= 0].cpu(), bag.words).all())


def _text_apart(observation: Observation, found: Reconstruction) -> float:
    if (batch := found.batch) is None:
        return math.inf
    reproduction = Reproduction(observation, model_as_sent(observation))
    if batch.labels.dim() == 1 and (labels := reproduction.labels(batch.inputs)) is not None:
        batch = Batch(batch.inputs, labels)
    unknown = batch.labels < 0
    if getattr(observation.model, "next_token", False) or not unknown.any():
        return reproduction.distance(batch)
    tried = (batch.labels.masked_fill(unknown, each) for each in range(observation.num_classes))
    return min(reproduction.distance(Batch(batch.inputs, labels)) for labels in tried)


class TableMembers(_Members):
    """Attack on table rows: of exact solutions and TabLeak, the result whose gradient is nearest to the update.

    For defended updates, a search for the likeliest rows under the noise follows, which starts from that result.
    """

    def __call__(self, observations: Sequence[Observation], *, seed: int, progress: Progress) -> list[Reconstruction]:
        attack = ExactInversion(rounds=max(1, min(400, self.evaluations // 12)) if self.evaluations else 400)
        with within(SOLVED * seconds_left()) as limit:
            found = attack(observations, seed=seed, progress=part_of_work(progress, 0.0, _SHOWN_OF_ROWS))
        best = [_as_rows(o, replace(one, member="exact")) for o, one in zip(observations, found, strict=True)]
        left = [k for k, one in enumerate(best) if one.batch is None or one.certainty is Certainty.APPROXIMATE]
        if not left:
            return best
        asked = [observations[k] for k in left]
        seen = {k: one or own for k, one, own in zip(left, _with_inferred_noise(asked), asked, strict=True)}
        defended = any(one.knowledge.defense for one in seen.values())
        shown = 1.0 - (1.0 - _SHOWN_OF_ROWS) / 2 * defended
        with within(seconds_left() / (1 + defended)):
            evaluations = self.evaluations or evaluations_in_time(
                lambda number: self._member(number, asked[0])(asked, seed=seed), len(asked), cut=limit.cut
            )
            member, report = self._member(evaluations, asked[0]), part_of_work(progress, _SHOWN_OF_ROWS, shown)
            sought = member(asked, seed=seed, progress=report)
        for k, other in zip(left, sought, strict=True):
            solved = best[k].batch
            if other.batch is None:
                best[k] = best[k] if solved is not None else replace(other, member="tableak")
                continue
            apart = _rows_apart(observations[k], other.batch)
            if solved is None or apart <= _rows_apart(observations[k], solved):
                sure = Certainty.CONSISTENT if apart < ROUNDING else Certainty.APPROXIMATE
                best[k] = replace(other, member="tableak", certainty=sure)
        unsure = [k for k in left if seen[k].knowledge.defense and best[k].certainty is Certainty.APPROXIMATE]
        likeliest = LikeliestRows(evaluations=evaluations, device=self.device)(
            [seen[k] for k in unsure],
            seed=seed,
            progress=part_of_work(progress, shown, 1.0),
            starts=[best[k].batch for k in unsure],
        )
        for k, other in zip(unsure, likeliest, strict=True):
            best[k] = best[k] if other.batch is None else other
        return best

    def _member(self, evaluations: int, first: Observation) -> GradientInversion:
        attempts = min(_ATTEMPTS, max(1, evaluations // LEAST))
        attack = tableak(iterations=max(1, evaluations // attempts), restarts=attempts)
        return self._placed(replace(attack, labels=policy_for(first)))


def _with_inferred_noise(observations: Sequence[Observation]) -> list[Observation | None]:
    """Return observations with inferred noise or rounding as known defense; ``None`` for other inferred defenses."""
    found: list[Observation | None] = []
    for own, seen in zip(observations, evident_defense.undo_evident_defenses(observations), strict=True):
        inferred = own.knowledge.defense is None and seen.knowledge.defense
        found.append(None if inferred and not isinstance(inferred[0].effect, Quantized | Noise) else seen)
    return found


def _as_rows(observation: Observation, found: Reconstruction) -> Reconstruction:
    schema = schema_of(observation.model)
    if found.certainty is not Certainty.CONSISTENT or found.batch is None or schema is None:
        return found
    rows = Batch(schema.nearest(found.batch.inputs), found.batch.labels)
    if _rows_apart(observation, rows) < ROUNDING:
        return found
    return replace(found, batch=rows, certainty=Certainty.APPROXIMATE)


def _rows_apart(observation: Observation, rows: Batch) -> float:
    if targets.needs_unrolling(observation.plan, observation.upload.num_examples, "unroll"):
        return math.inf
    distance = Reproduction(observation, model_as_sent(observation)).distance(rows)
    return distance if math.isfinite(distance) else math.inf
