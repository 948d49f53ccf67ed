"""What each attacker read in each round, and the one ordering by which everything is said to leak more or less.

A run is attacked by a plain attacker and perhaps by an adaptive one, in one round or several, a training of a sweep by
several attacks. Whatever a page says of it, by a figure, a color, a point or a sentence, is of the reading that leaks
most by :class:`Extent`, and names it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fl_privacy.metrics import FEW, METRICS, Statistic
from fl_privacy.metrics.registry import IMAGE_METRIC, TEXT_METRIC
from fl_privacy.results.counts import Counts
from fl_privacy.results.summary import Leakage, Recognized, Summary
from fl_privacy.victim_ids import Attacker

COMPARED: Mapping[str, tuple[str, ...]] = {
    IMAGE_METRIC: ("psnr", "ssim", "lpips"),
    TEXT_METRIC: ("token_f1", "token_recall", "rouge_l"),
}
"""Main metric of a kind of example -> those that are shown side by side, itself first."""

TRANSFORMED_METRIC = "transformed_psnr"
"""How near guesses come to the images that a defense put in place of the originals."""


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
        """The metric that is shown first."""
        return self.leakage.main

    @property
    def counts(self) -> Counts:
        """How many were read."""
        return self.leakage.counts

    def counted_by(self, metric: str) -> Recognized | None:
        """The count that a paper made by a threshold of ``metric``; ``None`` where it was not measured."""
        return self.leakage.recognized_by(metric)

    def among(self, others: "Sequence[Reading]") -> str:
        """What tells it from ``others`` in words; empty if nothing does."""
        words = [f"{self.attacker} attacker"] if len({other.attacker for other in others}) > 1 else []
        words += [self.attack] if len({other.attack for other in others}) > 1 else []
        words += [f"round {self.round}"] if len({other.round for other in others}) > 1 else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True, order=True)
class Extent:
    """How much leaks; larger is more. Fields are compared in their order.

    Attributes:
        read: share of the attacked examples that were read; what nobody could judge counts as read if asked for.
        exact: share read exactly.
        told: questions beside examples, such as who took part, that were answered better than by chance.
        exposed: share recognizable as what a defense put in place of the originals.
        upper: upper end of the 95 % interval of the main metric's mean; infinite where there is none.
        mean: of the main metric.
    """

    read: float = 0.0
    exact: float = 0.0
    told: int = 0
    exposed: float = 0.0
    upper: float = -math.inf
    mean: float = -math.inf


WORST = Extent(read=1.0, exact=1.0, upper=math.inf, mean=math.inf)
"""Of what was not attacked, or not to the end: it may leak more than all that was."""


def extent_of(found: Sequence[Reading], *, told: int = 0, unknown_is_read: bool = True) -> Extent:
    """How much all of ``found`` leak together: each figure of the reading that it is worst for.

    Args:
        found: of one run, training or defense.
        told: see ``Extent``.
        unknown_is_read: whether examples that nobody could judge count as read, as in the choice of a defense.
    """
    if not found:
        return WORST if unknown_is_read else Extent(told=told)
    statistics = [s for reading in found if (s := reading.statistic(reading.main)) is not None]
    exposed = most_exposed(found)
    return Extent(
        read=max(_share(r.counts.read + r.counts.unjudged * unknown_is_read, r, unknown_is_read) for r in found),
        exact=max(_share(r.counts.exact, r, unknown_is_read) for r in found),
        told=told,
        exposed=exposed.recognizable / exposed.n if exposed else 0.0,
        upper=max((s.ci95[1] if s.ci95 else math.inf for s in statistics), default=math.inf),
        mean=max((s.mean for s in statistics), default=math.inf),
    )


def _share(count: int, reading: Reading, of_all: bool) -> float:
    number = reading.counts.images if of_all else reading.counts.judged
    return count / number if number else float(of_all)


def leaks_most(found: Sequence[Reading]) -> Reading | None:
    """The reading of largest extent among those of which any example was judged; of equals the first."""
    known = [(extent_of([reading], unknown_is_read=False), reading) for reading in found if reading.counts.judged]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def readings_of(summary: Summary, attack: str = "", *, undefended: bool = False) -> list[Reading]:
    """All that a run's ``summary`` holds, round by round."""
    return [
        Reading(attacker=attacker, leakage=leakage, round=entry.round, attack=attack, undefended=undefended)
        for entry in summary.attacked
        for attacker, leakage in entry.by.items()
    ]


def worst_by(metric: str, found: Sequence[Reading]) -> Reading | None:
    """The one with the worst mean of ``metric``, for that metric's column; of equals the first."""
    measured = [(reading, s.mean) for reading in found if (s := reading.statistic(metric)) is not None]
    sign = 1 if metric not in METRICS or METRICS[metric].leaks == "high" else -1
    return max(measured, key=lambda pair: sign * pair[1])[0] if measured else None


def most_exposed(found: Sequence[Reading]) -> Recognized | None:
    """The largest share of images that came out as what a defense put in their place; ``None`` if none did."""
    bounds = [bound for reading in found if (bound := reading.counted_by(TRANSFORMED_METRIC))]
    most = max(bounds, key=lambda bound: bound.recognizable / bound.n, default=None)
    return most if most and most.recognizable else None


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


def few(statistic: Statistic, kind: str = "image") -> str:
    """A warning in words where there are too few images, or others of a ``kind``, for an interval; else empty."""
    number, n = statistic.groups, statistic.n
    if number >= FEW:
        return ""
    return f"only {number} {kind if number == n else 'upload'}{'' if number == 1 else 's'}"
