"""Counts of examples by outcome, for one attacker and round, and the probability of such counts by chance."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fl_privacy.measure.intervals import binomial_tail, combined, either, share_interval
from fl_privacy.measure.outcome import ImageScore, Outcome
from fl_privacy.measure.registry import TEXT_METRIC
from fl_privacy.types.modality import MODALITIES
from fl_privacy.types.victim_ids import Certainty


@dataclass(frozen=True, kw_only=True)
class Words:
    """Numbers of distinct words in the attacked uploads, and of those guessed right and wrong."""

    read: int = 0  # right words in uploads whose words exceed their frequency control
    there: int = 0  # true words in all uploads attacked for words
    wrong: int = 0  # wrong words in the uploads of ``read``
    texts: int = 0  # number of texts behind ``there``


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of attacked examples by outcome, from ``exact`` to ``nothing``, for one attacker in one round."""

    exact: int = 0  # reconstructed to the last bit, or proven
    identified: int = 0  # original nearest to the guess among many candidates; not exact
    recognizable: int = 0  # above a published threshold and the control; not exact or identified
    nothing: int = 0  # guessed without any of these outcomes
    failures: int = 0  # without a guess
    unknown: int = 0  # without an original to compare with
    older: int = 0  # scored by an older version without controls, whose outcome is unknown
    groups: int = 0  # independent uploads behind the scored examples
    candidates: int = 0  # least number of distractors of a guess; 0 without distractors
    words: Words = field(default_factory=Words)
    # probability that guesses without the update make as many recognizable; 0 if one exceeds its control by far
    luck: float = 0.0
    # probability that guesses without the update score as well; 1 without a comparison, ``None`` for images
    chance: float | None = None
    # probability that guesses without the update lead as far for as many images; ``None`` if unknown
    identified_by_chance: float | None = None

    @property
    def read(self) -> int:
        return self.exact + self.identified + self.recognizable

    @property
    def judged(self) -> int:
        return self.read + self.nothing

    @property
    def unjudged(self) -> int:
        return self.failures + self.unknown + self.older

    @property
    def images(self) -> int:
        return self.judged + self.unjudged

    @property
    def share(self) -> float | None:
        return self.read / self.judged if self.judged else None

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the share of reconstructed examples; (0, 1) if none was scored."""
        return share_interval(self.read, self.judged, groups=self.groups or None) if self.judged else (0.0, 1.0)

    @property
    def by_chance(self) -> float:
        """Return the probability that guesses without the update reconstruct at least as many examples (p-value).

        It is ``chance`` for rows and texts. For images, it is 0 if one is exact, or else the first of these:
        ``identified_by_chance``, if known; ``luck``, if an image is recognizable; a binomial tail in which each image
        is identified with probability 1 / (candidates + 1).
        """
        if self.chance is not None:
            return self.chance
        if self.exact:
            return 0.0
        if self.identified_by_chance is not None:
            return self.identified_by_chance
        if self.recognizable:
            return self.luck
        return binomial_tail(self.identified, self.judged, 1 / (self.candidates + 1))

    def as_plain(self) -> dict[str, Any]:
        return {**asdict(self), "read": self.read, "judged": self.judged, "interval95": list(self.interval)}


def count(scores: Iterable[tuple[str, ImageScore]]) -> Counts:
    """Count the examples attacked by one attacker in one round by outcome; ``scores``: pairs of upload id and score."""
    found, scores = dict.fromkeys(Outcome, 0), list(scores)
    failures = unknown = older = 0
    judged = list[tuple[str, ImageScore]]()
    for id, score in scores:
        compared, has_original = score.compared, any(modality.metric in score.values for modality in MODALITIES)
        since = (compared.likeness, compared.control_psnr, compared.control_f1, compared.control_cells)
        if score.failure is not None:
            failures += 1
        elif has_original and all(figure is None for figure in since):
            older += 1
        elif score.outcome is None or (score.outcome is Outcome.NOTHING and not has_original):
            unknown += 1
        else:
            found[score.outcome] += 1
            judged.append((id, score))
    return Counts(
        exact=found[Outcome.EXACT],
        identified=found[Outcome.IDENTIFIED],
        recognizable=found[Outcome.RECOGNIZABLE],
        nothing=found[Outcome.NOTHING],
        failures=failures,
        unknown=unknown,
        older=older,
        groups=len({id for id, _ in judged}),
        candidates=min((int(s.compared.candidates) for _, s in judged if s.compared.candidates), default=0),
        words=_words_of(scores),
        luck=_luck_of(judged),
        chance=_chance_of(judged),
        identified_by_chance=_chance_of_identified(judged),
    )


def _chance_of(judged: Sequence[tuple[str, ImageScore]]) -> float | None:
    known = [(id, score.compared) for id, score in judged if score.compared.chance is not None]
    if not known:
        return None
    if any(score.certainty == Certainty.PROVEN and score.outcome is Outcome.EXACT for _, score in judged):
        return 0.0
    asked = {id: [p for p in (of.chance, of.word_chance) if p is not None] for id, of in known}
    return combined([either(*each) for each in asked.values()])


def _chance_of_identified(judged: Sequence[tuple[str, ImageScore]]) -> float | None:
    likely = [s for _, s in judged if s.outcome in ("identified", "recognizable") and s.compared.likeness is not None]
    if not likely:
        return None
    chances = sorted(score.chance for score in likely)
    ends = {1: chances[0], len(chances): chances[-1]}
    return min(1.0, len(ends) * min(binomial_tail(number, len(judged), p) for number, p in ends.items()))


def _luck_of(judged: Sequence[tuple[str, ImageScore]]) -> float:
    every, lucky = set[tuple[str, int]](), dict[tuple[str, int], float]()
    for id, score in judged:
        key = id, 0 if TEXT_METRIC in score.values else score.image
        every.add(key)
        if score.outcome is Outcome.RECOGNIZABLE:
            lucky[key] = min(score.chance, lucky.get(key, 1.0))
    return 0.0 if not lucky or not all(lucky.values()) else binomial_tail(len(lucky), len(every), max(lucky.values()))


def _words_of(scores: Sequence[tuple[str, ImageScore]]) -> Words:
    uploads = {id: score for id, score in scores if score.compared.words_there}
    above = [score.compared for score in uploads.values() if score.words_are_read]
    return Words(
        read=sum(int(figures.words_read or 0) for figures in above),
        there=sum(int(score.compared.words_there or 0) for score in uploads.values()),
        wrong=sum(int(figures.words_false or 0) for figures in above),
        texts=sum(int(score.compared.words_of or 0) for score in uploads.values()),
    )
