"""Choose the most accurate of several defenses behind which no attack reconstructed anything."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fl_privacy.attacks.inference.kinds import About
from fl_privacy.measure import FEW
from fl_privacy.measure.intervals import share_interval
from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.measure.roc import Finding, Measure
from fl_privacy.measure.rule import above_chance
from fl_privacy.runs.folder.leakage import Extent, extent_of, leaks_most, main_of, most_exposed, worst_by
from fl_privacy.runs.folder.summary import LeakageResult

HEADLINE: Mapping[str, str] = {
    "membership": "tpr_at_1_percent",
    "source": "asr",
    "attribute": "asr",
    "property": "error",
}
"""Question -> measure by which its inference attacks are compared."""

LOW_LEAKS = frozenset({"error"})  # measures whose low values mean that more was inferred

CAN_INFER: Mapping[str, str] = {
    "membership": "who took part",
    "source": "which client holds an example",
    "attribute": "attributes of the examples",
    "property": "properties of a client's data",
}
"""Question -> headline's words for what the server can infer."""


def is_above_chance(name: str, measure: Measure, *, among: int = 1) -> bool:
    """Return whether the measure called ``name`` is above chance, at a level corrected for ``among`` measures."""
    return above_chance(measure, among=among, low_leaks=name in LOW_LEAKS)


def number_of_measures(findings: Sequence[Finding]) -> int:
    """Count the measured values in all ``findings``."""
    return sum(len(finding.measures) for finding in findings)


def answered_above_chance(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the facts (keys of ``CAN_INFER``) inferred above chance, at a level corrected for the number of tests."""
    number = number_of_measures(findings)
    leaks = {f.about for f in findings if any(is_above_chance(n, m, among=number) for n, m in f.measures.items())}
    return tuple(about for about in dict.fromkeys(f.about for f in findings) if about in leaks)


def strongest(findings: Sequence[Finding], about: str) -> tuple[Finding, Measure] | None:
    """Return the result that leaks most about ``about``, such as membership, and its main measure, if any."""
    name = HEADLINE.get(about, "")
    known = [(f, f.measures[name]) for f in findings if f.about == about and name in f.measures]
    sign = -1 if name in LOW_LEAKS else 1
    return max(known, key=lambda pair: (sign * pair[1].value, sign * pair[1].low), default=None)


def disproves(findings: Sequence[Finding], *, epsilon: float) -> bool:
    """Return whether an attack disproved the claimed epsilon."""
    return any(f.proven_epsilon is not None and f.proven_epsilon > epsilon for f in findings)


MEMBERSHIP_AT_MOST = 0.05  # TPR at 1 % FPR, five times that of guessing: above it, members count as distinguished
ATTRIBUTE_AT_MOST = 0.1  # success above that of the most frequent answer: above it, an attribute counts as inferred
ROUNDING = 1e-9  # tolerance of accuracies: a loss of exactly the bound is within it


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A defense at one strength; each figure of leakage is the worst over all attacks."""

    name: str
    accuracy: float  # final accuracy in [0, 1]
    pmm: float | None  # percent of the undefended accuracy; ``None`` if that is not known
    psnr: float  # mean PSNR in dB; for other modalities, the mean of their main metric
    upper: float  # upper end of its 95 % interval; infinite without one, as for a single image
    largest: float  # PSNR of the best reconstructed image
    read: int  # examples reconstructed by the attack that leaks most
    exact: int
    identified: int  # examples of ``read`` identified among distractors
    images: int  # examples scored for that attack
    unjudged: int  # largest number of unscored examples of one attack, failures included
    groups: int  # smallest number of independent uploads behind a count
    exposed: int = 0  # images recognizable as a defense's substitute
    failures: int = 0  # largest number of images on which one attack failed
    by: str = ""  # attacker that leaks most, in words; empty if only one attacked
    judged_by: str = IMAGE_METRIC
    # question -> measure of the strongest attack; ``None`` if the attack failed or only others were attacked
    inferred: Mapping[str, Measure | None] = field(default_factory=dict)
    undefended: bool = False
    # least excess of the mean of ``judged_by`` over the best guess without the update; ``None`` if not measured
    over_control: float | None = None

    @property
    def open_questions(self) -> list[str]:
        """Return the inferences, such as membership, that were not measured or may succeed more often than allowed."""
        limits = {
            About.MEMBERSHIP: lambda m: m.high <= MEMBERSHIP_AT_MOST,
            About.ATTRIBUTE: lambda m: m.high <= m.chance + ATTRIBUTE_AT_MOST,
        }
        asked = [(about, kept, self.inferred[about]) for about, kept in limits.items() if about in self.inferred]
        return [about for about, kept, measure in asked if measure is None or not kept(measure)]

    @property
    def unknown(self) -> int:
        return max(self.unjudged, self.failures)

    @property
    def at_most(self) -> float:
        return share_interval(self.read, self.images, groups=self.groups or None)[1] if self.images else 1.0

    @property
    def extent(self) -> Extent:
        number = self.images + self.unknown
        return Extent(
            read=(self.read + self.unknown) / number if number else 1.0,
            exact=self.exact / number if number else 1.0,
            inferred=len(self.open_questions),
            exposed=self.exposed / self.images if self.images else 0.0,
            upper=self.upper,
            mean=self.psnr,
        )

    def unread(self, psnr_below: float | None = None) -> bool:
        """Return whether nothing leaks, no measurement is missing, and each image's PSNR is below ``psnr_below`` dB."""
        return (
            self.images > 0
            and not (self.undefended or self.read or self.unknown or self.exposed or self.open_questions)
            and (psnr_below is None or max(self.largest, self.upper) < psnr_below)
        )

    @property
    def rests_on_few(self) -> bool:
        return self.groups < FEW


def candidate_of(
    found: Sequence[LeakageResult],
    *,
    name: str,
    accuracy: float | None,
    pmm: float | None,
    findings: Sequence[Finding] = (),
    asked: Collection[str] = (),
    undefended: bool = False,
) -> Candidate | None:
    """Return one training's defense as a candidate to choose; ``None`` if accuracy or scored examples are missing.

    ``found``: results of reconstruction. ``pmm``: accuracy in percent of the undefended training's. ``findings``:
    results of inference attacks; ``asked``: inference questions, such as membership, that need results.
    """
    name_of_main = main_of(found)
    worst, most = worst_by(name_of_main, found), leaks_most(found)
    if accuracy is None or worst is None or most is None:
        return None
    statistics = [s for reading in found if (s := reading.statistic(name_of_main)) is not None]
    extent, counts = extent_of(found), most.counts
    return Candidate(
        name=name,
        accuracy=accuracy,
        pmm=pmm,
        psnr=extent.mean,
        upper=extent.upper,
        largest=max(s.max for s in statistics),
        read=counts.read,
        exact=counts.exact,
        identified=counts.identified,
        images=counts.judged,
        unjudged=max(reading.counts.unjudged for reading in found),
        groups=min(reading.counts.groups for reading in found if reading.counts.judged),
        exposed=seen.recognizable if (seen := most_exposed(found)) else 0,
        failures=max(reading.counts.failures for reading in found),
        by=most.among(found),
        judged_by=name_of_main,
        inferred={about: (most_of[1] if (most_of := strongest(findings, about)) else None) for about in asked},
        undefended=undefended,
        over_control=least_over_control(found),
    )


def least_over_control(found: Sequence[LeakageResult]) -> float | None:
    """Return the smallest advantage of an attack over guesses made without the update; ``None`` if not measured.

    For each attack and round, only the attacker with the largest advantage counts.
    """
    best: dict[tuple[str, int], float] = {}
    for reading in found:
        above, key = reading.over_control, (reading.attack, reading.round)
        best[key] = max(best.get(key, -math.inf), -math.inf if above is None else above)
    least = min(best.values(), default=-math.inf)
    return least if math.isfinite(least) else None


def asked_of(findings: Sequence[Finding]) -> set[str]:
    """Return the inferences in ``findings`` that matter for choosing a defense: membership and attribute."""
    return {finding.about for finding in findings} & {About.MEMBERSHIP, About.ATTRIBUTE}


def comparable(candidates: Sequence[Candidate]) -> bool:
    """Return whether all candidates have one modality."""
    return len({c.judged_by for c in candidates}) <= 1


def unread_undefended(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the undefended training with the largest leakage (:class:`Extent`), if none had an example reconstructed.

    ``None`` otherwise, or if the data of ``candidates`` have different modalities.
    """
    plain = [c for c in candidates if c.undefended]
    if not comparable(candidates) or not plain or any(c.read for c in plain):
        return None
    return max(plain, key=lambda c: c.extent)


def best_unread(candidates: Sequence[Candidate], psnr_below: float | None = None) -> Candidate | None:
    """Return the most accurate candidate that leaks nothing; ``psnr_below``: PSNR in dB that no image may reach.

    ``None`` if all leak, if attacks fail even without a defense, or if the candidates' data have different modalities.
    """
    if not comparable(candidates) or unread_undefended(candidates):
        return None
    least_first = sorted((c for c in candidates if c.unread(psnr_below)), key=lambda c: c.extent)
    return max(least_first, key=lambda c: c.accuracy, default=None)
