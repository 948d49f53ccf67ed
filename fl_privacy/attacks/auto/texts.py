"""Texts for ``attack=auto``: exact solutions if proven, else what reproduces the update best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fl_privacy.attacks.attack import Limit, Progress, part_of_work, seconds_left, within
from fl_privacy.attacks.auto.sub_attacks import SOLVED, evaluations_in_time
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent
from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.settings import Rearranging
from fl_privacy.attacks.presets import inverting_gradients, lamp, tag
from fl_privacy.attacks.text import BagOfWords, Dager
from fl_privacy.progress import counted
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

_SHOWN = 0.1
"""Share of the progress for DAGER."""

TAG_RATE, TAG_DECAY = 0.2, 0.05
"""Larger than the preset's: embeddings that decay reach words sooner, also behind trained weights."""

ORDERED = Rearranging(tries=100, last=6)
"""Ordering of the reconstructed words: by the gradient, and by public texts if there are some."""


@dataclass(frozen=True, kw_only=True)
class TextMembers:
    """DAGER, and for unproven texts the bag of words, descents and LAMP's moves.

    As tokens leave no slope, results are compared by the distance of their tokens' gradient from the update.

    Attributes:
        evaluations: evaluations of loss and gradient for each victim, shared by the descents; ``None``: as many as
            there is time for, with at most three quarters of it for DAGER.
    """

    evaluations: int | None
    device: str | None = None
    most_victims: int | None = None

    def __call__(self, observations: Sequence[Observation], *, seed: int, progress: Progress) -> list[Reconstruction]:
        bags = BagOfWords()(observations, seed=seed)
        with within(SOLVED * seconds_left()) as limit:
            exact = Dager()(observations, seed=seed, progress=part_of_work(progress, 0.0, _SHOWN))
        best = [replace(one, member="dager") for one in exact]
        best = self._descended(observations, best, bags, limit, seed=seed, progress=progress)
        results = []
        for one, bag in zip(best, bags, strict=True):
            words, all_found = bag.words, bag.words_exact
            if one.batch is not None and one.certainty is not Certainty.APPROXIMATE:
                words, all_found = one.batch.inputs[one.batch.inputs >= 0].cpu(), True
            results.append(replace(one, words=words, words_exact=all_found))
        return results

    def _descended(
        self,
        observations: Sequence[Observation],
        best: list[Reconstruction],
        bags: Sequence[Reconstruction],
        limit: Limit,
        *,
        seed: int,
        progress: Progress,
    ) -> list[Reconstruction]:
        left = [k for k, one in enumerate(best) if one.certainty is Certainty.APPROXIMATE]
        for k in left:
            best[k] = _nearer(observations[k], best[k], replace(bags[k], member="bag of words"), bags[k])
        if not left:
            return best
        asked = []
        for k in left:  # descents start from the words of a whole bag
            bag, size = bags[k].batch, observations[k].upload.num_examples
            whole = bag is not None and len(bag.inputs) == size
            asked.append(observations[k].told(previous=bag.inputs) if bag is not None and whole else observations[k])
        evaluations = self.evaluations or evaluations_in_time(
            lambda number: self._members(2 * number, asked[0])["tag"](asked, seed=seed), len(asked), cut=limit.cut
        )
        members = self._members(evaluations, asked[0])
        apart, half = {k: _apart(observations[k], best[k]) for k in left}, (1 - _SHOWN) / len(members)
        for number, (name, member) in enumerate(members.items()):
            shown = part_of_work(progress, _SHOWN + number * half, _SHOWN + (number + 1) * half)
            (reached,) = (member(asked, seed=seed, progress=shown) for _ in counted(name, [name]))
            for k, found in zip(left, reached, strict=True):
                if best[k].batch is not None and not _within_bag(found, bags[k]):
                    continue
                distance = _apart(observations[k], found)
                if distance < apart[k] or (best[k].batch is None and found.batch is not None):
                    sure = Certainty.CONSISTENT if distance < ROUNDING else Certainty.APPROXIMATE
                    told = f"{name} from the words" if bags[k].batch is not None else name
                    best[k], apart[k] = replace(found, member=told, certainty=sure), distance
        return best

    def _members(self, evaluations: int, first: Observation) -> dict[str, GradientInversion]:
        prior = 0.0 if first.knowledge.public_images is None else ORDERED.prior
        each = max(1, evaluations // 2)
        placed = {"device": self.device, "most_victims": self.most_victims}
        return {
            "tag": replace(tag(iterations=each, lr=TAG_RATE, weight_decay=TAG_DECAY), **placed),  # type: ignore[arg-type]
            "inverting gradients": replace(inverting_gradients(iterations=each), **placed),  # type: ignore[arg-type]
            "order of words": replace(lamp(iterations=1), moves=replace(ORDERED, prior=prior), **placed),  # type: ignore[arg-type]
        }


def _nearer(
    observation: Observation, one: Reconstruction, other: Reconstruction, bag: Reconstruction
) -> Reconstruction:
    """Return ``other`` if ``one`` has no guess, a word outside an exact ``bag``, or a larger distance."""
    if other.batch is None:
        return one
    if one.batch is None or not _within_bag(one, bag):
        return other
    return other if _apart(observation, other) < _apart(observation, one) else one


def _within_bag(found: Reconstruction, bag: Reconstruction) -> bool:
    if bag.words is None or not bag.words_exact or found.batch is None:
        return True
    tokens = found.batch.inputs
    return bool(torch.isin(tokens[tokens >= 0].cpu(), bag.words).all())


def _apart(observation: Observation, found: Reconstruction) -> float:
    if found.batch is None:
        return float("inf")
    reproduction = Reproduction(observation, model_as_sent(observation))
    batch = found.batch
    if batch.labels.dim() == 1 and (labels := reproduction.labels(batch.inputs)) is not None:
        batch = Batch(batch.inputs, labels)
    return reproduction.distance(batch)
