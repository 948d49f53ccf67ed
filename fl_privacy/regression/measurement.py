"""What an app's uploads gave away of chosen images."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fl_privacy.checks import one_of
from fl_privacy.errors import UserError
from fl_privacy.metrics import METRICS, Metric, Statistic, aggregate
from fl_privacy.metrics.intervals import wilson_interval
from fl_privacy.metrics.outcome import READ, Outcome, outcome_of
from fl_privacy.results import Attacker, Run, read_run
from fl_privacy.victim_ids import VictimId


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How well each of N images was read.

    Attributes:
        metric: a name in ``METRICS``.
        attack: who attacked, in words.
        values: (N,) of the metric, in the order of the images.
        uploads: (N,) which upload each image was in; images of one upload were attacked together.
        victims: a digest of the images, which tells whether another measurement is of the same ones.
        versions: of the packages that decide the values.
        read: images that were read, by the rule of every page; ``None`` where an older version measured.
    """

    metric: str
    attack: str
    values: tuple[float, ...]
    uploads: tuple[int, ...]
    victims: str
    versions: Mapping[str, str]
    read: int | None = None

    @property
    def judged_by(self) -> Metric:
        """The metric itself."""
        return METRICS[self.metric]

    @property
    def statistic(self) -> Statistic:
        """Mean and 95 % interval, over uploads."""
        found = aggregate(self.values, groups=self.uploads, within=self.judged_by.range)
        assert found is not None
        return found

    @property
    def read_in_words(self) -> str:
        """How many were read of how many; where none was, with the largest share that this allows (95 %)."""
        if self.read is None:
            return f"an unknown number of {len(self.values)} images"
        if self.read:
            return f"{self.read} of {len(self.values)} images"
        upper = wilson_interval(0, len(self.values), groups=len(set(self.uploads)))[1]
        return f"none of {len(self.values)} images (up to {100 * upper:.0f} % of such images may be)"


def expect_metric(metric: str) -> None:
    """Refuse a name that is no metric that compares images.

    Raises:
        UserError: it is none.
    """
    one_of("metric", metric, [name for name, known in METRICS.items() if known.of == "images"])


def measured(
    *,
    metric: str,
    attack: str,
    values: Iterable[float],
    uploads: Iterable[object],
    victims: Iterable[str],
    outcomes: Iterable[Outcome | None] = (),
) -> Measurement:
    """A measurement, of images of which every value is known.

    Args:
        metric: a name in ``METRICS``.
        attack: who attacked, in words.
        values: (N,) of the metric, NaN where an attack failed.
        uploads: (N,) names of the uploads.
        victims: (N,) what tells each image from others.
        outcomes: (N,) what was read of each, ``None`` where that cannot be said.

    Raises:
        UserError: there is no such metric, no image, or one of which nothing is known.
    """
    expect_metric(metric)
    known = tuple(map(float, values))
    numbers: dict[object, int] = {}
    groups = tuple(numbers.setdefault(upload, len(numbers)) for upload in uploads)
    unknown = sum(math.isnan(value) for value in known)
    if unknown or not known:
        raise UserError(
            f"{metric} is expected to be known of every attacked image, but is not of {unknown or 'any'} of"
            f" {len(known)}: the attack failed, or the metric can't be computed, which says nothing of the uploads."
        )
    digest = hashlib.sha256("\n".join(victims).encode()).hexdigest()
    versions = {package: version(package) for package in ("fl-privacy", "torch")}
    found = list(outcomes)
    return Measurement(
        metric=metric,
        attack=attack,
        values=known,
        uploads=groups,
        victims=digest,
        versions=versions,
        read=None if not found or None in found else sum(outcome in READ for outcome in found),
    )


def measure_run(folder: Path, *, metric: str = "psnr") -> Measurement:
    """Of the run, attack or audit in ``folder``: in the attacked round and by the attacker with the worst mean.

    Images are told by their victim's name, whatever the round, so that two runs are of the same ones if both have the
    same seed and data.

    Raises:
        UserError: it is no run's folder, did not finish, attacked nothing, or failed on an image.
    """
    run = read_run(folder)
    if not run.finished:
        raise UserError(f"{folder} is expected to hold a run that finished, but it did not; start it again.")
    expect_metric(metric)
    found = [(attacker, *key, images) for attacker in Attacker for key, images in _by_round(run, attacker).items()]
    if not found:
        raise UserError(f"{folder} is expected to hold attacked images, but none was attacked.")
    sign = 1 if METRICS[metric].leaks == "high" else -1
    attacker, round, images = max(found, key=lambda one: sign * _mean(one[2], metric))
    choices = run.identity.config.get("choices", {})
    return measured(
        metric=metric,
        attack=f"{choices.get('attack', 'an attack')}, {attacker} attacker, round {round}",
        values=[_value(image, metric) for image in images],
        uploads=[image["id"] for image in images],
        outcomes=[outcome_of(image) for image in images],
        victims=[f"{choices.get('data')} {VictimId.parse(str(i['id'])).source} {i['image']}" for i in images],
    )


def _by_round(run: Run, attacker: Attacker) -> Mapping[tuple[int], list[Mapping[str, Any]]]:
    images = run.of_kind("image", attacker)
    rounds = Counter(image["round"] for image in images)
    return {(round,): [image for image in images if image["round"] == round] for round in rounds}


def _value(image: Mapping[str, Any], metric: str) -> float:
    value = None if image.get("failure") else image.get(metric)
    return math.nan if value is None else float(value)


def _mean(images: Iterable[Mapping[str, Any]], metric: str) -> float:
    values = [value for image in images if not math.isnan(value := _value(image, metric))]
    return sum(values) / len(values) if values else -math.inf
