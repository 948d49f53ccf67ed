"""How many of the attacked examples one attacker read in one round, and how probable that is by chance."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fl_privacy.measure.chance import combined, either
from fl_privacy.measure.intervals import binomial_tail, share_at_most, share_interval
from fl_privacy.measure.outcome import Outcome, chance_of, outcome_of, words_are_read
from fl_privacy.measure.registry import TEXT_METRIC
from fl_privacy.types.modality import MODALITIES
from fl_privacy.types.victim_ids import Certainty

_JUDGED_SINCE = ("likeness", "control_psnr", "control_f1", "control_cells")
"""Columns that records of older versions do not have."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """Different words of attacked texts that were found, in no order, each upload counted once.

    Attributes:
        read: of uploads of which more words were read than their frequency alone tells.
        there: of all uploads in which words were looked for.
        wrong: read beside those, and in none of the texts.
        texts: behind ``there``.
    """

    read: int = 0
    there: int = 0
    wrong: int = 0
    texts: int = 0


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of the attacked examples of one attacker and round, each counted once, by the most that came of it.

    Attributes:
        exact: read to the last bit, or proven.
        identified: the victim's own example is the one nearest to the guess, among many candidates; not exact.
        recognizable: beyond a published threshold and beyond what a guess without the update reaches; neither of both.
        nothing: judged, and none of the three.
        failures: the attack gave no guess.
        unknown: nobody has the original to compare with.
        older: judged by a version that compared with no control; whether they were read cannot be said.
        groups: independent uploads behind those that were judged.
        candidates: fewest others that a guess was compared with; 0 where it was compared with none.
        words: of texts, read in no order.
        identified_by_chance: probability that guesses without the update identify, or recognize, as many images, by
            leads as large; ``None`` where leads are unknown.
        luck: probability that guesses without the update make at least as many recognizable; 0 where one of them beats
            its control by a margin.
        chance: probability that guesses without the update, assigned and judged in the same way, come to as much; 1
            where nothing was there to find it by, ``None`` where the kinds of counts say it.
    """

    exact: int = 0
    identified: int = 0
    recognizable: int = 0
    nothing: int = 0
    failures: int = 0
    unknown: int = 0
    older: int = 0
    groups: int = 0
    candidates: int = 0
    words: Words = field(default_factory=Words)
    luck: float = 0.0
    chance: float | None = None
    identified_by_chance: float | None = None

    @property
    def read(self) -> int:
        """Return how many were exact, identified or recognizable."""
        return self.exact + self.identified + self.recognizable

    @property
    def judged(self) -> int:
        """Return how many are known to be reconstructed or not."""
        return self.read + self.nothing

    @property
    def unjudged(self) -> int:
        """Return how many are not known to be reconstructed or not."""
        return self.failures + self.unknown + self.older

    @property
    def images(self) -> int:
        """Return how many were attacked."""
        return self.judged + self.unjudged

    @property
    def share(self) -> float | None:
        """Return the share reconstructed of those judged; ``None`` where none was."""
        return self.read / self.judged if self.judged else None

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of ``share``, over independent uploads; (0, 1) where none was judged."""
        return share_interval(self.read, self.judged, groups=self.groups or None) if self.judged else (0.0, 1.0)

    @property
    def at_most(self) -> float:
        """Return the largest share that is reconstructed, by one-sided 95 % confidence; 1 where none was judged."""
        return share_at_most(self.read, self.judged, groups=self.groups or None) if self.judged else 1.0

    @property
    def by_chance(self) -> float:
        """Return the probability that guesses without the update identify, or recognize, at least as many.

        Of rows and texts it is ``chance``. Of images each identifies with a probability that falls with the lead, see
        ``outcome.chance_of``; if leads are unknown, 1 / (candidates + 1). Exact ones are no matter of chance; of other
        recognizable examples see ``luck``.
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
        """Return plain values for JSON: every count, and the share reconstructed with its interval."""
        return {**asdict(self), "read": self.read, "judged": self.judged, "interval95": list(self.interval)}


def counts_of(records: Sequence[Mapping[str, Any]]) -> Counts:
    """Count the ``image`` records of one attacker and round."""
    found = dict.fromkeys(Outcome, 0)
    failures = unknown = older = 0
    groups, candidates, judged = set[str](), list[int](), list[tuple[Outcome, Mapping[str, Any]]]()
    for record in records:
        outcome = None if record.get("failure") is not None else outcome_of(record)
        if record.get("failure") is not None:
            failures += 1
        elif _has_original(record) and not any(name in record for name in _JUDGED_SINCE):
            older += 1
        elif outcome is None or (outcome is Outcome.NOTHING and not _has_original(record)):
            unknown += 1
        else:
            found[outcome] += 1
            judged.append((outcome, record))
            groups.add(str(record["id"]))
            if record.get("candidates"):
                candidates.append(int(record["candidates"]))
    return Counts(
        exact=found[Outcome.EXACT],
        identified=found[Outcome.IDENTIFIED],
        recognizable=found[Outcome.RECOGNIZABLE],
        nothing=found[Outcome.NOTHING],
        failures=failures,
        unknown=unknown,
        older=older,
        groups=len(groups),
        candidates=min(candidates, default=0),
        words=_words_of(records),
        luck=_luck_of(judged),
        chance=_chance_of([record for _, record in judged]),
        identified_by_chance=_chance_of_identified(judged),
    )


def _chance_of(judged: Sequence[Mapping[str, Any]]) -> float | None:
    """Return ``Counts.chance`` of rows and texts; ``None`` of images, and of records of older versions.

    What is proven is no matter of chance.
    """
    known = [record for record in judged if "chance" in record]
    if not known:
        return None
    if any(record.get("certainty") == Certainty.PROVEN and outcome_of(record) is Outcome.EXACT for record in judged):
        return 0.0
    asked = {str(r["id"]): [r[name] for name in ("chance", "word_chance") if r.get(name) is not None] for r in known}
    return combined([either(*each) for each in asked.values()])


def _chance_of_identified(judged: Sequence[tuple[Outcome, Mapping[str, Any]]]) -> float | None:
    """Return ``Counts.identified_by_chance``: of the one with the largest lead, or of all, whichever is less."""
    chances = sorted(chance_of(r) for what, r in judged if what in ("identified", "recognizable") and "likeness" in r)
    if not chances:
        return None
    ends = {1: chances[0], len(chances): chances[-1]}
    return min(1.0, len(ends) * min(binomial_tail(number, len(judged), p) for number, p in ends.items()))


def _luck_of(judged: Sequence[tuple[Outcome, Mapping[str, Any]]]) -> float:
    """Return ``Counts.luck`` of examples with their outcomes; texts of one upload, read by their words, are one."""
    every, lucky = set[tuple[str, int]](), dict[tuple[str, int], float]()
    for outcome, record in judged:
        key = str(record["id"]), 0 if TEXT_METRIC in record else int(record.get("image", 0))
        every.add(key)
        if outcome is Outcome.RECOGNIZABLE:
            lucky[key] = min(chance_of(record), lucky.get(key, 1.0))
    if not lucky or not all(lucky.values()):
        return 0.0
    return binomial_tail(len(lucky), len(every), max(lucky.values()))


def _words_of(records: Sequence[Mapping[str, Any]]) -> Words:
    """Count words by upload: all texts of one have the same figures of its words."""
    uploads = {str(record["id"]): record for record in records if record.get("words_there")}
    beyond = [record for record in uploads.values() if words_are_read(record)]
    return Words(
        read=sum(int(record["words_read"]) for record in beyond),
        there=sum(int(record["words_there"]) for record in uploads.values()),
        wrong=sum(int(record["words_false"]) for record in beyond),
        texts=sum(int(record["words_of"]) for record in uploads.values()),
    )


def _has_original(record: Mapping[str, Any]) -> bool:
    return any(modality.metric in record for modality in MODALITIES)
