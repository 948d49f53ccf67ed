"""Decide a run's verdict: red for leakage above chance, green for a privacy guarantee that bounds it, else gray."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Finding, identification_bound
from fl_privacy.measure.rule import above_chance
from fl_privacy.runs.folder import leakage
from fl_privacy.runs.folder.defense_choice import answered_above_chance, disproves
from fl_privacy.runs.folder.summary import LeakageResult, Recognized, Spent, Summary
from fl_privacy.types.modality import IMAGES, Modality
from fl_privacy.types.victim_ids import Certainty

if TYPE_CHECKING:
    from fl_privacy.runs.folder.read import Run

Tone = Literal["leak", "bounded", "open"]  # red, green, gray
LEAK: Tone = "leak"
BOUNDED: Tone = "bounded"
OPEN: Tone = "open"
BOUNDED_AT_MOST = 0.1  # largest probability of identification that counts as bounded: nine of ten attempts fail
CANDIDATES = 1000  # number of distractors for the bound if guesses were compared with none, or with more


class Ground(StrEnum):
    """The reason for a verdict."""

    READ = "read"  # examples were reconstructed above chance. Red.
    INFERRED = "told"  # another question was answered better than by chance. Red.
    REHEARSED = "rehearsed"  # examples were reconstructed, but only from undefended uploads that the server made itself
    BOUNDED = "bounded"  # differential privacy bounds every attacker. Green.
    UNREAD = "unread"  # nothing was reconstructed by the attacks tried
    BY_CHANCE = "by chance"  # identification was not above chance
    NO_TRUTH = "no truth"  # originals of most examples are not known
    FAILED = "failed"  # attacks failed on all examples
    OLDER = "older"  # scores are of a version without controls
    NOT_INFERRED = "untold"  # only other questions were asked, and none was answered better than by chance
    NOTHING = "nothing"  # nothing was attacked


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bound by differential privacy on the probability that an attacker identifies an example or client (``unit``)."""

    epsilon: float
    delta: float
    unit: str
    rounds: int  # number of rounds that spent epsilon
    candidates: int  # number of examples among which one is sought
    at_most: float  # largest probability


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """Verdict on a run: color (``tone``), reason (``ground``), and the results behind both."""

    tone: Tone
    ground: Ground
    modality: Modality = IMAGES
    facts: leakage.AttackFacts = field(default_factory=leakage.AttackFacts)
    most: LeakageResult | None = None  # result that leaks most; ``None`` if nothing could be scored
    by_round: Mapping[int, LeakageResult] = field(default_factory=dict)  # result that leaks most in each attacked round
    readings: tuple[LeakageResult, ...] = ()
    inferred: tuple[str, ...] = ()  # other questions answered better than by chance
    asked: tuple[Finding, ...] = ()  # findings on other questions, if they have figures
    bound: Bound | None = None
    exposed: Recognized | None = None  # count of a defense's substitutes reconstructed; ``None`` if 0
    proven: int = 0  # most examples proven by one attacker

    @property
    def counts(self) -> Counts:
        return self.most.counts if self.most else Counts()

    def as_plain(self) -> dict[str, Any]:
        most = self.most
        return {
            "tone": self.tone,
            "ground": self.ground,
            "most": most and {"attacker": most.attacker, "round": most.round, **most.counts.as_plain()},
            "told": list(self.inferred),
            "bound": self.bound and asdict(self.bound),
            "attack": self.facts.attack,
            "budget": self.facts.budget,
            "uploads": self.facts.source,
        }


def verdict_of(run: Run) -> Verdict:
    """Judge how much ``run`` leaked."""
    data, false = run.identity.config.get("data"), any(claim.is_false for claim in run.claims)
    loader = str(data.get("_target_", "")) if isinstance(data, Mapping) else ""
    return judged(run.summary, leakage.facts_of(run), claim_is_false=false, loader=loader)


def judged(summary: Summary, facts: leakage.AttackFacts, *, claim_is_false: bool = False, loader: str = "") -> Verdict:
    """Judge how much a run leaks.

    ``claim_is_false``: ``True`` if the stated epsilon was refuted, so that it bounds nothing. ``loader``: name of the
    function that loads the data.
    """
    found = summary.attacked
    asked = tuple(finding for finding in summary.inferred if finding.measures)  # others failed, or had too few examples
    inferred, bound = answered_above_chance(summary.inferred), _bound(summary.privacy, found, summary.inferred)
    bound = None if claim_is_false else bound
    counts = [reading.counts for reading in found]
    cases = (
        (tone_of(found, facts.source) == LEAK, Ground.READ),
        (inferred, Ground.INFERRED),
        (is_read(found), Ground.REHEARSED),
        (not found and asked, Ground.NOT_INFERRED),
        (not found, Ground.NOTHING),
        (any(c.older for c in counts), Ground.OLDER),
        (all(c.failures == c.images for c in counts), Ground.FAILED),
        (all(c.unknown > c.judged for c in counts if c.judged), Ground.NO_TRUTH),
        (any(c.read for c in counts), Ground.BY_CHANCE),
        (bound is not None and bound.at_most <= BOUNDED_AT_MOST, Ground.BOUNDED),
    )
    ground = next((ground for holds, ground in cases if holds), Ground.UNREAD)
    rounds = sorted({reading.round for reading in found})
    return Verdict(
        tone=_TONES.get(ground, OPEN),
        ground=ground,
        modality=leakage.modality_attacked(found, loader),
        facts=facts,
        most=leakage.leaks_most(found),
        by_round={r: most for r in rounds if (most := leakage.leaks_most(leakage.in_round(found, r))) is not None},
        readings=found,
        inferred=inferred,
        asked=asked,
        bound=bound,
        exposed=leakage.most_exposed(found),
        proven=max((r.certainties.get(Certainty.PROVEN, 0) for r in found), default=0),
    )


CHANCE_TONES: Mapping[bool, Tone] = {True: LEAK, False: OPEN}  # ``True`` for an inference above chance -> its tone
_TONES: Mapping[Ground, Tone] = {Ground.READ: LEAK, Ground.INFERRED: LEAK, Ground.BOUNDED: BOUNDED}


def tone_of(found: Sequence[LeakageResult], source: leakage.AttackedUploads = leakage.AttackedUploads.PROBES) -> Tone:
    """Return the verdict's color: ``LEAK`` if uploads that clients made leak above chance, else ``OPEN``."""
    return LEAK if source is not leakage.AttackedUploads.SERVER and is_read(found) else OPEN


def is_read(found: Sequence[LeakageResult]) -> bool:
    """Return whether a result is above chance, at a significance level corrected for the number of results."""
    return any(above_chance(reading.counts, among=len(found)) for reading in found)


def _bound(privacy: Spent | None, found: Sequence[LeakageResult], inferred: Sequence[Finding]) -> Bound | None:
    if privacy is None or privacy.epsilon is None or not math.isfinite(privacy.epsilon):
        return None
    if privacy.unit is None or not privacy.covered or disproves(inferred, epsilon=privacy.epsilon):
        return None
    candidates = min([*(r.counts.candidates for r in found if r.counts.candidates), CANDIDATES])
    spent: dict[str, Any] = {"epsilon": privacy.epsilon, "delta": privacy.delta, "candidates": candidates}
    bound = Bound(unit=privacy.unit, rounds=privacy.rounds, at_most=identification_bound(**spent), **spent)
    return None if any(r.counts.interval[0] > bound.at_most for r in found) else bound
