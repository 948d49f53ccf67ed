"""Which defense keeps leakage below a bound at the highest accuracy, in a sentence."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fl_privacy.inference.kinds import About
from fl_privacy.metrics import FEW, METRICS
from fl_privacy.metrics.registry import IMAGE_METRIC
from fl_privacy.report.inferred import strongest
from fl_privacy.report.numbers import metric, percent, points, title
from fl_privacy.report.readings import (
    Reading,
    main_of,
    most_exposed,
    most_recognized,
    recognized_otherwise,
    worst_by,
)
from fl_privacy.results import Finding, Measure, Recognized

MEMBERSHIP_AT_MOST = 0.05
"""TPR at 1 % FPR, five times that of guessing: beyond, members count as told from others."""

ATTRIBUTE_AT_MOST = 0.1
"""Success above that of the most frequent answer: beyond, an attribute counts as told."""

RECOGNIZABLE = METRICS["psnr"].bound or math.nan
"""Decibel."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train, attacked in all ways that were tried; each figure is of the attack that it is worst for.

    Attributes:
        name: in words.
        accuracy: in the end, in [0, 1].
        pmm: in percent of the undefended accuracy, ``None`` where that is unknown.
        psnr: mean PSNR, in dB; of texts the mean of the metric that they are judged by.
        upper: upper end of its 95 % interval, likewise; infinite where there is none, as for a single image.
        largest: PSNR of the image that was read best, likewise.
        recognizable: images recognizable by it, of the attack that recognized the largest share.
        images: of how many.
        exposed: images recognizable as what a defense put in their place, likewise.
        otherwise: images recognizable by another metric, likewise; ``None`` if none is.
        groups: the smallest number of independent images behind an interval.
        failures: images on which an attack failed, of the attack that failed most.
        by: who had the largest mean, in words; empty where only one attacked.
        judged_by: the metric that all this is of.
        inferred: what was asked beside images -> the measure by which the strongest attack came farthest; ``None``
            where it was asked of others and not of this one, or the attack failed.
        undefended: whether clients don't defend themselves.
    """

    name: str
    accuracy: float
    pmm: float | None
    psnr: float
    upper: float
    largest: float
    recognizable: int
    images: int
    groups: int
    exposed: int = 0
    otherwise: Recognized | None = None
    failures: int = 0
    by: str = ""
    judged_by: str = IMAGE_METRIC
    inferred: Mapping[str, Measure | None] = field(default_factory=dict)
    undefended: bool = False

    @property
    def tells(self) -> list[str]:
        """What may be told of clients beside images, by upper ends of intervals; what is not known may be."""
        limits = {
            About.MEMBERSHIP: lambda m: m.high <= MEMBERSHIP_AT_MOST,
            About.ATTRIBUTE: lambda m: m.high <= m.chance + ATTRIBUTE_AT_MOST,
        }
        return [
            about for about, kept in limits.items() if about in self.inferred and not _holds(kept, self.inferred[about])
        ]

    def keeps_all_below(self, bound: float) -> bool:
        """Whether no attacked image came to ``bound``, as far as attacks did not fail, which none may have.

        The mean has to stay below with 95 % confidence too, nothing else may be told of the clients, what stands in
        place of the images may not be recognizable, and clients have to defend themselves.
        """
        return (
            not self.undefended
            and not self.tells
            and not self.failures
            and not self.exposed
            and self.largest < bound
            and self.keeps_mean_below(bound)
        )

    @property
    def rests_on_few(self) -> bool:
        """Whether so few independent uploads were attacked that nothing can be relied on."""
        return self.groups < FEW

    @property
    def doubts(self) -> str:
        """Why nothing can be relied on though every image stays below the bound, a sentence each; else empty."""
        words = []
        if self.rests_on_few:
            words.append(f"That rests on {self.groups} independent uploads, too few to rely on.")
        if self.otherwise:
            words.append(f"{_by_another(self.otherwise)} of its images are recognizable all the same.")
        return " ".join(words)

    def keeps_mean_below(self, bound: float) -> bool:
        """Whether the mean stays below ``bound`` with 95 % confidence."""
        return self.upper < bound


def _by_another(bound: Recognized) -> str:
    return f"By {title(bound.metric)}, {bound.recognizable} of {bound.n}"


def _holds(kept: Callable[[Measure], bool], measure: Measure | None) -> bool:
    return measure is not None and kept(measure)


def candidate_of(
    found: Sequence[Reading],
    *,
    name: str,
    accuracy: float | None,
    pmm: float | None,
    findings: Sequence[Finding] = (),
    asked: Collection[str] = (),
    undefended: bool = False,
) -> Candidate | None:
    """From all attacks on one training; ``None`` where it has no accuracy, or no attack gave images.

    Args:
        found: what was read of images.
        name: in words.
        accuracy: in [0, 1].
        pmm: in percent.
        findings: what was asked beside.
        asked: what was asked of any of those compared.
        undefended: whether clients don't defend themselves.
    """
    name_of_main = main_of(found)
    worst, recognized = worst_by(name_of_main, found), most_recognized(found)
    if accuracy is None or worst is None or recognized is None:
        return None
    statistics = [s for reading in found if (s := reading.statistic(name_of_main)) is not None]
    bound = recognized.recognized_by()
    assert bound is not None
    return Candidate(
        name=name,
        accuracy=accuracy,
        pmm=pmm,
        psnr=max(s.mean for s in statistics),
        upper=max(s.ci95[1] if s.ci95 else math.inf for s in statistics),
        largest=max(s.max for s in statistics),
        recognizable=bound.recognizable,
        images=bound.n,
        groups=min(s.groups for s in statistics),
        exposed=seen.recognizable if (seen := most_exposed(found)) else 0,
        otherwise=recognized_otherwise(found),
        failures=max(reading.failures for reading in found),
        by=worst.among(found),
        judged_by=name_of_main,
        inferred={about: (told[1] if (told := strongest(findings, about)) else None) for about in asked},
        undefended=undefended,
    )


def asked_of(findings: Sequence[Finding]) -> set[str]:
    """What of ``findings`` counts for the choice of a defense."""
    return {finding.about for finding in findings} & {About.MEMBERSHIP, About.ATTRIBUTE}


def bound_of(candidates: Sequence[Candidate], psnr_below: float) -> float:
    """What is to be stayed below: images ``psnr_below`` dB, texts what counts as recognizable."""
    name = next((c.judged_by for c in candidates), IMAGE_METRIC)
    return psnr_below if name == IMAGE_METRIC else METRICS[name].bound or math.nan


def bound_as_goal(candidates: Sequence[Candidate], psnr_below: float) -> str:
    """For example ``every attacked image below 15.0 dB``."""
    name = next((c.judged_by for c in candidates), IMAGE_METRIC)
    value = metric(bound_of(candidates, psnr_below), name)
    return f"every attacked image below {value}" if name == IMAGE_METRIC else f"every attacked text below {value} F1"


def unread(candidates: Sequence[Candidate], psnr_below: float) -> Candidate | None:
    """The undefended training of which most was read, if nothing was read of any: who reads nothing there tells nothing
    of defenses."""
    bound, plain = bound_of(candidates, psnr_below), [c for c in candidates if c.undefended]
    mixed = len({c.judged_by for c in candidates}) > 1
    if mixed or not plain or any(c.recognizable or c.largest >= bound for c in plain):
        return None
    return max(plain, key=lambda c: c.largest)


def nothing_told(candidate: Candidate, psnr_below: float) -> str:
    """That ``candidate``, undefended, was not read, in words."""
    return (
        f"Which defense keeps {bound_as_goal([candidate], psnr_below)} is not told: none was read undefended either"
        f" ({candidate.name}, the best at {metric(candidate.largest, candidate.judged_by)}). The attack may be too"
        " weak, which more iterations or attack=auto would show, or this training shows little by itself."
    )


def best_below(candidates: Sequence[Candidate], psnr_below: float) -> Candidate | None:
    """The most accurate of those that keep every image below ``psnr_below`` dB, or every text from being recognizable;
    of equals the one that leaks less. ``None`` also where the undefended was not read."""
    if len({c.judged_by for c in candidates}) > 1 or unread(candidates, psnr_below):
        return None
    bound = bound_of(candidates, psnr_below)
    return _most_accurate([c for c in candidates if c.keeps_all_below(bound)])


def answer(candidates: Sequence[Candidate], psnr_below: float) -> str:
    """A few sentences; empty where nothing was both trained and attacked."""
    if not candidates:
        return ""
    if len({c.judged_by for c in candidates}) > 1:
        return "Images were read of some and texts of others, which no figure compares."
    if quiet := unread(candidates, psnr_below):
        return nothing_told(quiet, psnr_below)
    bound, best = bound_of(candidates, psnr_below), best_below(candidates, psnr_below)
    goal = bound_as_goal(candidates, psnr_below) + _limits(candidates)
    on_average = _most_accurate([c for c in candidates if c.keeps_mean_below(bound) and c != best])
    if best is None:
        least = min(candidates, key=_leak)
        sentences = [f"None is sure to keep {goal}; {least.name} comes closest"]
        sentences[0] += f" ({_leakage(least)})."
    else:
        number = sum(c.keeps_all_below(bound) for c in candidates)
        kept = f", {points(best.pmm)} of the undefended" if best.pmm is not None else ""
        price = f"{best.name} (accuracy {percent(best.accuracy)}{kept}; {_leakage(best)})"
        sentences = [
            f"Of {len(candidates)}, only {price} keeps {goal}."
            if number == 1
            else f"{number} of {len(candidates)} keep {goal}; the most accurate is {price}."
        ]
        if best.doubts:
            sentences.append(best.doubts)
    if on_average and (best is None or on_average.accuracy > best.accuracy):
        sentences.append(
            f"Only the mean stays below with {on_average.name} (accuracy {percent(on_average.accuracy)};"
            f" {_leakage(on_average)})."
        )
    return " ".join(sentences)


def _most_accurate(candidates: Sequence[Candidate]) -> Candidate | None:
    return max(candidates, key=lambda c: (c.accuracy, -c.psnr), default=None)


def _leak(candidate: Candidate) -> tuple[int, float, int, int, float, float]:
    """Smaller is less; what an attack failed on, or was read in place of the images, may be worse than any figure."""
    share = candidate.recognizable / candidate.images
    return len(candidate.tells), share, candidate.exposed, candidate.failures, candidate.upper, candidate.psnr


def _leakage(candidate: Candidate) -> str:
    name, kind = candidate.judged_by, "image" if candidate.judged_by == IMAGE_METRIC else "text"
    at_most = f", at most {metric(candidate.upper, name)}" if math.isfinite(candidate.upper) else f", of one {kind}"
    by = f" [{candidate.by}]" if candidate.by else ""
    share = f"{candidate.recognizable} of {candidate.images} {kind}s recognizable"
    share += f", and {candidate.exposed} as what the defense put in their place" if candidate.exposed else ""
    mean, best = metric(candidate.psnr, name), metric(candidate.largest, name)
    failed = f", while an attack failed on {candidate.failures}" if candidate.failures else ""
    return f"mean {title(name)} {mean}{at_most}{by}, {share}, the best at {best}{failed}{told_beside(candidate)}"


def _limits(candidates: Sequence[Candidate]) -> str:
    """What else is wanted of a defense, as far as it was asked."""
    asked = {about for candidate in candidates for about in candidate.inferred}
    limits = {
        About.MEMBERSHIP: f"with at most {percent(MEMBERSHIP_AT_MOST)} of the members found at 1 % FPR",
        About.ATTRIBUTE: f"and an attribute told at most {100 * ATTRIBUTE_AT_MOST:.0f} points above guessing",
    }
    return "".join(f", {words}" for about, words in limits.items() if about in asked)


def told_beside(candidate: Candidate) -> str:
    """What was told of clients beside images, in words; empty where nobody asked."""
    words = {About.MEMBERSHIP: "TPR at 1 % FPR", About.ATTRIBUTE: "attribute"}
    told = []
    for about, measure in sorted(candidate.inferred.items()):
        shown = "not known" if measure is None else f"{percent(measure.value)}, at most {percent(measure.high)}"
        chance = "" if measure is None else f", guessing {percent(measure.chance)}"
        told.append(f"; {words[About(about)]} {shown}{chance}")
    return "".join(told)
