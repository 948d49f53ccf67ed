"""PPC curves and CAP over any mechanisms that were trained and attacked at several strengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fl_privacy.metrics import Statistic
from fl_privacy.metrics.trade_off import PpcPoint, cap
from fl_privacy.report.trade_off import DefenseRow, Versus
from fl_privacy.results import Leakage

DISTANCES: Mapping[str, str] = {
    "reconstruction": "Reconstruction: rMSE",
    "label": "Label: share wrong",
    "tracing": "Tracing: share wrong",
}
"""Of SPN's three attacks -> title. What the paper calls membership is the label."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A mechanism at one strength under one attack.

    Attributes:
        mechanism: samples of one mechanism make a curve.
        strength: in words.
        versus: who attacked.
        accuracy: of the training, in [0, 1].
        ratio: ||B|| / ||E||, mean over the attacked updates; infinite where the defense changed nothing.
        distances: by name in ``DISTANCES``, as far as they were measured.
        training: names what was trained; samples of the same one differ in who attacked.
    """

    mechanism: str
    strength: str
    versus: Versus
    accuracy: float
    ratio: float
    distances: Mapping[str, float]
    training: str

    def point(self, distance: str) -> PpcPoint | None:
        """On the curve of ``distance``; ``None`` if that was not measured."""
        if distance not in self.distances:
            return None
        return PpcPoint(accuracy=self.accuracy, distance=self.distances[distance], signal_to_distortion=self.ratio)


@dataclass(frozen=True, kw_only=True)
class Cap:
    """Calibrated averaged performance of a mechanism.

    Attributes:
        mechanism: whose.
        distance: name in ``DISTANCES``.
        versus: who attacked.
        value: higher is better.
        points: strengths that it is the mean of.
    """

    mechanism: str
    distance: str
    versus: Versus
    value: float
    points: int


def samples_of_rows(rows: Sequence[DefenseRow]) -> list[Sample]:
    """Of a trade-off sweep, in its order; those of jobs that did not finish are left out."""
    found = []
    for row in rows:
        for versus in row.leakage:
            own = [r.leakage for r in row.readings if (r.attack, r.attacker) == (versus.attack, versus.attacker)]
            sample = sample_of(
                own,
                mechanism=row.outcome.family,
                strength=row.outcome.strength,
                versus=versus,
                accuracy=row.accuracy,
                update_distortion=row.attacks[versus.attack].update_distortion,
                training=row.outcome.training.as_posix(),
            )
            found += [sample] if sample and not row.outcome.undefended else []
    return with_worst(found)


def sample_of(
    leakages: Sequence[Leakage],
    *,
    mechanism: str,
    strength: str,
    versus: Versus,
    accuracy: float | None,
    update_distortion: Mapping[str, Statistic],
    training: str,
) -> Sample | None:
    """From what one attacker read in each round; ``None`` where the accuracy or the distortion is not known."""
    ratio = update_distortion.get("signal_to_distortion")
    distances = _least([distances_of(leakage) for leakage in leakages])
    if accuracy is None or ratio is None or not distances:
        return None
    return Sample(
        mechanism=mechanism,
        strength=strength,
        versus=versus,
        accuracy=accuracy,
        ratio=ratio.mean,
        distances=distances,
        training=training,
    )


def with_worst(samples: Sequence[Sample]) -> list[Sample]:
    """``samples``, and for each training that several attackers met what the worse of them leaves of each distance."""
    met: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        met.setdefault((sample.training, sample.versus.attack), []).append(sample)
    found = []
    for (_, attack), of_training in met.items():
        found += of_training
        if len({sample.versus.attacker for sample in of_training}) > 1:
            distances = _least([sample.distances for sample in of_training])
            found.append(replace(of_training[0], versus=Versus(attack, "worst"), distances=distances))
    return found


def distances_of(leakage: Leakage) -> dict[str, float]:
    """Mean distances of the three attacks by name."""
    metrics = leakage.metrics
    found = {}
    if "rmse" in metrics and not math.isinf(metrics["rmse"].mean):
        found["reconstruction"] = metrics["rmse"].mean
    if "label_correct" in metrics:
        found["label"] = 1 - metrics["label_correct"].mean
    if leakage.tracing:
        found["tracing"] = leakage.tracing.mean
    return found


def _least(distances: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The smallest of each kind: the attack that came nearest."""
    return {
        kind: min(d[kind] for d in distances if kind in d) for kind in DISTANCES if any(kind in d for d in distances)
    }


def caps(samples: Sequence[Sample]) -> list[Cap]:
    """Of every mechanism under every attack."""
    curves: dict[tuple[str, str, Versus], list[PpcPoint]] = {}
    for distance in DISTANCES:
        for sample in samples:
            if (point := sample.point(distance)) is not None:
                curves.setdefault((sample.mechanism, distance, sample.versus), []).append(point)
    return [
        Cap(mechanism=mechanism, distance=distance, versus=versus, value=cap(points), points=len(points))
        for (mechanism, distance, versus), points in curves.items()
    ]


def cap_as_plain(found: Cap) -> dict[str, Any]:
    """CAP with its keys spelled out, as JSON takes them."""
    return {
        "mechanism": found.mechanism,
        "distance": found.distance,
        "attack": found.versus.attack,
        "attacker": found.versus.attacker,
        "cap": found.value,
        "points": found.points,
    }
