"""Who read most: the one rule by which every page judges a run.

A run is attacked by a plain attacker and perhaps by an adaptive one, in one round or several, a training of a sweep by
several attacks. Whatever a page says of it, by a figure, a color, a point or a sentence, is of the one that read most,
and names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fl_privacy.metrics import FEW, METRICS, Statistic
from fl_privacy.metrics.registry import IMAGE_METRIC, TEXT_METRIC
from fl_privacy.results import Attacker, Leakage, Recognized, Summary

COMPARED: Mapping[str, tuple[str, ...]] = {
    IMAGE_METRIC: ("psnr", "ssim", "lpips"),
    TEXT_METRIC: ("token_f1", "token_recall", "rouge_l"),
}
"""Metric by which readings are judged -> those by which they are compared, itself first."""

Tone = Literal["leak", "private", "open"]
"""``leak`` if any image is recognizable, ``private`` if none is and the interval says so too, ``open`` otherwise."""

TRANSFORMED_METRIC = "transformed_psnr"
"""By which images that a defense put in place of the originals count as recognizable."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """What one attacker read in one round.

    Attributes:
        attacker: who.
        leakage: what came of it.
        round: of the training that was attacked.
        attack: name of the attack, where there are several.
        undefended: whether clients did not defend themselves.
    """

    attacker: Attacker
    leakage: Leakage
    round: int = 0
    attack: str = ""
    undefended: bool = False

    def statistic(self, metric: str) -> Statistic | None:
        """Over the images of the round; ``None`` if it was not measured, or the attack failed on all of them."""
        return self.leakage.metrics.get(metric)

    @property
    def main(self) -> str:
        """The metric by which it is judged."""
        return self.leakage.main

    def recognized_by(self, metric: str | None = None) -> Recognized | None:
        """How many images are recognizable by ``metric``, by default the main one; likewise."""
        return self.leakage.recognized_by(metric)

    @property
    def failures(self) -> int:
        """Images on which the attack failed: whether they can be read is not known."""
        return self.leakage.failures

    @property
    def unjudged(self) -> int:
        """Images of which nobody can say whether they are recognizable: the attack failed, or there is no original."""
        bound = self.recognized_by()
        return self.leakage.images - (bound.n if bound else 0)

    @property
    def recognized(self) -> float:
        """Share of the images that are recognizable, in [0, 1]; -1 where that is not known."""
        bound = self.recognized_by()
        return bound.recognizable / bound.n if bound else -1.0

    def tone(self, metric: str | None = None) -> Tone | None:
        """By ``metric``, by default the main one; ``None`` where it says nothing."""
        name = metric or self.main
        statistic, bound = self.statistic(name), self.recognized_by(name)
        if statistic is None or bound is None:
            return None
        return tone(statistic, bound, unjudged=self.leakage.images - bound.n, undefended=self.undefended)

    def among(self, others: "Sequence[Reading]") -> str:
        """What tells it from ``others`` in words; empty if nothing does."""
        words = [f"{self.attacker} attacker"] if len({other.attacker for other in others}) > 1 else []
        words += [self.attack] if len({other.attack for other in others}) > 1 else []
        words += [f"round {self.round}"] if len({other.round for other in others}) > 1 else []
        return ", ".join(words)


def readings_of(summary: Summary, attack: str = "", *, undefended: bool = False) -> list[Reading]:
    """All that a run's ``summary`` holds, round by round."""
    return [
        Reading(attacker=attacker, leakage=leakage, round=entry.round, attack=attack, undefended=undefended)
        for entry in summary.attacked
        for attacker, leakage in entry.by.items()
    ]


def worst_by(metric: str, found: Sequence[Reading]) -> Reading | None:
    """The one that read most by the mean of ``metric``; of equals the first. ``None`` where it was not measured."""
    measured = [(reading, s.mean) for reading in found if (s := reading.statistic(metric)) is not None]
    sign = 1 if metric not in METRICS or METRICS[metric].leaks == "high" else -1
    return max(measured, key=lambda pair: sign * pair[1])[0] if measured else None


def most_recognized(found: Sequence[Reading]) -> Reading | None:
    """The one with the largest share of recognizable images, of equals the larger mean."""
    known = [(extent, reading) for reading in found if (extent := reading.leakage.extent) is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def most_exposed(found: Sequence[Reading]) -> Recognized | None:
    """The largest share of images that were recognizable as what a defense put in their place; ``None`` if none was."""
    bounds = [bound for reading in found if (bound := reading.recognized_by(TRANSFORMED_METRIC))]
    most = max(bounds, key=lambda bound: bound.recognizable / bound.n, default=None)
    return most if most and most.recognizable else None


def recognized_otherwise(found: Sequence[Reading]) -> Recognized | None:
    """The largest share of images that are recognizable by another metric than the main one, such as by SSIM; ``None``
    if none is."""
    bounds = [bound for reading in found for bound in reading.leakage.thresholds if _is_beside(bound, reading.main)]
    most = max(bounds, key=lambda bound: bound.recognizable / bound.n, default=None)
    return most if most and most.recognizable else None


def _is_beside(bound: Recognized, main: str) -> bool:
    return bound.n > 0 and bound.metric not in (main, TRANSFORMED_METRIC)


def kind_of(found: Sequence[Reading]) -> Literal["image", "text"]:
    """What was attacked, in a word."""
    return "text" if any(reading.main == TEXT_METRIC for reading in found) else "image"


def main_of(found: Sequence[Reading]) -> str:
    """The metric by which all of ``found`` can be compared; empty where images and texts were read."""
    known = {reading.main for reading in found if reading.leakage.metrics}
    return known.pop() if len(known) == 1 else "" if known else IMAGE_METRIC


def in_round(found: Sequence[Reading], round: int) -> list[Reading]:
    """Those of one round."""
    return [reading for reading in found if reading.round == round]


def tone(statistic: Statistic, bound: Recognized, *, unjudged: int, undefended: bool = False) -> Tone:
    """Whether a metric says that images leaked, that they did not, or neither.

    Private takes more than a mean on the right side: no image beyond the bound, none ``unjudged``, at least ``FEW``
    independent ones, and an interval that stays on that side as well. Nothing is private that is ``undefended``: what
    was not read of it tells of the attack, which may have been too weak.
    """
    if bound.recognizable:
        return "leak"
    if undefended or unjudged or statistic.groups < FEW or statistic.ci95 is None:
        return "open"
    low, high = statistic.ci95
    return "private" if (high < bound.value if bound.leaks == "above" else low >= bound.value) else "open"


def tone_of(found: Sequence[Reading]) -> Tone:
    """Of all readings together by their main metric: a leak if any is one, private if all are.

    Not private where another metric calls an image recognizable, nor where the images that a defense put in place of
    the originals were read: a figure of how far these are from the originals, such as of a shifted face, does not say
    what a person sees in them.
    """
    tones = [tone for reading in found if (tone := reading.tone())]
    if "leak" in tones:
        return "leak"
    private = set(tones) == {"private"} and len(tones) == len(found)
    return "private" if private and not most_exposed(found) and not recognized_otherwise(found) else "open"


def few(statistic: Statistic, kind: str = "image") -> str:
    """A warning in words where there are too few images, or others of a ``kind``, for an interval; else empty."""
    number, n = statistic.groups, statistic.n
    if number >= FEW:
        return ""
    return f"only {number} {kind if number == n else 'upload'}{'' if number == 1 else 's'}"
