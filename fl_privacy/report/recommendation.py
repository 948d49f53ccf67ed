"""Which defense keeps leakage below a bound at the highest accuracy, in a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.metrics import FEW, METRICS
from fl_privacy.report.numbers import metric, percent, points
from fl_privacy.report.readings import Reading, most_recognized, worst_by

RECOGNIZABLE = METRICS["psnr"].bound or math.nan
"""Decibel."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train, attacked in all ways that were tried; each figure is of the attack that it is worst for.

    Attributes:
        name: in words.
        accuracy: in the end, in [0, 1].
        pmm: in percent of the undefended accuracy, ``None`` where that is unknown.
        psnr: mean PSNR, in dB.
        upper: upper end of its 95 % interval, in dB; infinite where there is none, as for a single image.
        largest: PSNR of the image that was read best, in dB.
        recognizable: images recognizable by PSNR, of the attack that recognized the largest share.
        images: of how many.
        groups: the smallest number of independent images behind an interval.
        failures: images on which an attack failed, of the attack that failed most.
        by: who had the largest mean, in words; empty where only one attacked.
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
    failures: int = 0
    by: str = ""

    def keeps_all_below(self, bound: float) -> bool:
        """Whether no attacked image came to ``bound`` dB, as far as attacks did not fail, which none may have.

        The mean has to stay below with 95 % confidence as well.
        """
        return not self.failures and self.largest < bound and self.keeps_mean_below(bound)

    def keeps_mean_below(self, bound: float) -> bool:
        """Whether the mean PSNR stays below ``bound`` dB with 95 % confidence."""
        return self.upper < bound


def candidate_of(found: Sequence[Reading], *, name: str, accuracy: float | None, pmm: float | None) -> Candidate | None:
    """From all attacks on one training; ``None`` where it has no accuracy, or no attack gave images."""
    worst, recognized = worst_by("psnr", found), most_recognized(found)
    if accuracy is None or worst is None or recognized is None:
        return None
    statistics = [s for reading in found if (s := reading.statistic("psnr")) is not None]
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
        failures=max(reading.failures for reading in found),
        by=worst.among(found),
    )


def best_below(candidates: Sequence[Candidate], psnr_below: float) -> Candidate | None:
    """The most accurate of those that keep every image below ``psnr_below`` dB; of equals the one that leaks less."""
    return _most_accurate([c for c in candidates if c.keeps_all_below(psnr_below)])


def answer(candidates: Sequence[Candidate], psnr_below: float) -> str:
    """A few sentences; empty where nothing was both trained and attacked."""
    if not candidates:
        return ""
    bound, best = metric(psnr_below, "psnr"), best_below(candidates, psnr_below)
    on_average = _most_accurate([c for c in candidates if c.keeps_mean_below(psnr_below) and c != best])
    if best is None:
        least = min(candidates, key=lambda c: (c.recognizable / c.images, c.upper, c.psnr))
        sentences = [f"None is sure to keep every attacked image below {bound}; {least.name} comes closest"]
        sentences[0] += f" ({_leakage(least)})."
    else:
        number = sum(c.keeps_all_below(psnr_below) for c in candidates)
        kept = f", {points(best.pmm)} of the undefended" if best.pmm is not None else ""
        price = f"{best.name} (accuracy {percent(best.accuracy)}{kept}; {_leakage(best)})"
        sentences = [
            f"Of {len(candidates)}, only {price} keeps every attacked image below {bound}."
            if number == 1
            else f"{number} of {len(candidates)} keep every attacked image below {bound}; the most accurate is {price}."
        ]
        if best.groups < FEW:
            sentences.append(f"That rests on {best.groups} independent uploads, too few to rely on.")
    if on_average and (best is None or on_average.accuracy > best.accuracy):
        sentences.append(
            f"Only the mean stays below with {on_average.name} (accuracy {percent(on_average.accuracy)};"
            f" {_leakage(on_average)})."
        )
    return " ".join(sentences)


def _most_accurate(candidates: Sequence[Candidate]) -> Candidate | None:
    return max(candidates, key=lambda c: (c.accuracy, -c.psnr), default=None)


def _leakage(candidate: Candidate) -> str:
    at_most = f", at most {metric(candidate.upper, 'psnr')}" if math.isfinite(candidate.upper) else ", of one image"
    by = f" [{candidate.by}]" if candidate.by else ""
    share = f"{candidate.recognizable} of {candidate.images} images recognizable"
    mean, best = metric(candidate.psnr, "psnr"), metric(candidate.largest, "psnr")
    failed = f", while an attack failed on {candidate.failures}" if candidate.failures else ""
    return f"mean PSNR {mean}{at_most}{by}, {share}, the best at {best}{failed}"
