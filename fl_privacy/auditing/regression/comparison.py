"""A paired test of a measurement against a baseline of the same images, kept as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy.auditing.regression.measurement import Measurement
from fl_privacy.checks import fits
from fl_privacy.errors import UserError
from fl_privacy.files import write_whole
from fl_privacy.measure import METRICS, Statistic, aggregate

LEVEL, FEWEST = 0.05, 5
"""Probability of a false alarm without a change, and smallest number of groups for which p can be below it."""

EXACT = 14
"""Largest number of independent groups with all sign flips; beyond, 2^14 random ones."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of a paired test: whether more leaks than before, and the probability ``p`` of such a rise by chance."""

    worse: bool
    p: float
    change: Statistic
    sentence: str


def compare(before: Measurement, now: Measurement) -> Comparison:
    """Test whether the same images are reconstructed better ``now`` than ``before``.

    It is a one-sided sign-flip (permutation) test of the mean difference, paired by image. Images that shared an upload
    in either measurement are flipped together (a cluster-level test). It is exact for up to ``EXACT`` groups. A rise
    below the mean's shown digits is ignored, since library versions round differently.

    Raises:
        UserError: images or metrics differ, or there are too few uploads.
    """
    expect_enough(before.uploads)
    expect_enough(now.uploads)
    if before.metric != now.metric:
        raise UserError(f"The baseline is expected to be of {now.metric}, but is of {before.metric}; update it.")
    if before.victims != now.victims or len(before.values) != len(now.values):
        raise UserError(
            "The baseline is expected to be of the same images, but those attacked now are others"
            f" ({len(before.values)} then, {len(now.values)} now); measure the same ones, or update it."
        )
    groups = _joined(before.uploads, now.uploads)
    expect_enough(groups.tolist())
    difference = np.asarray(now.values) - np.asarray(before.values)
    sign = 1.0 if now.judged_by.leaks == "high" else -1.0
    p = sign_flip_p(np.bincount(groups, weights=sign * difference))
    change = aggregate(difference.tolist(), groups=groups.tolist())
    assert change is not None
    shown = now.judged_by.digits
    rises = shown(before.statistic.mean) != shown(now.statistic.mean)  # otherwise it may be rounding
    worse = p < LEVEL and rises
    return Comparison(worse=worse, p=p, change=change, sentence=_sentence(before, now, change, p, worse=worse))


def sign_flip_p(sums: np.ndarray) -> float:
    """Return the one-sided p of the sum of independent groups' ``sums`` (G,) under random signs.

    Fisher 1935, "The Design of Experiments", section 21. With more than ``EXACT`` groups it is estimated from 2^14
    draws, the observed signs among them (Phipson and Smyth 2010).
    """
    count = len(sums)
    if count <= EXACT:
        flips = 1 - 2 * ((np.arange(1 << count)[:, None] >> np.arange(count)) & 1)
    else:
        flips = np.random.default_rng(0).choice((-1, 1), (1 << EXACT, count))
        flips[0] = 1
    slack = 1e-9 * np.abs(sums).sum()
    return float(np.mean(flips @ sums >= sums.sum() - slack))


def _joined(first: tuple[int, ...], second: tuple[int, ...]) -> np.ndarray:
    """Return the numbers (N,) of the finest common groups."""
    above = list(range(len(first)))

    def root(index: int) -> int:
        while above[index] != index:
            index = above[index]
        return index

    for uploads in (first, second):
        seen: dict[int, int] = {}
        for index, upload in enumerate(uploads):
            above[root(index)] = root(seen.setdefault(upload, index))
    return np.unique([root(index) for index in range(len(first))], return_inverse=True)[1]


def _sentence(before: Measurement, now: Measurement, change: Statistic, p: float, *, worse: bool) -> str:
    metric, old, new = now.judged_by, before.statistic.mean, now.statistic.mean
    unit = f" {metric.unit}" if metric.unit else ""
    low, high = change.ci95 or (change.mean, change.mean)
    verdict = "more than before" if worse else "no more than before, as far as this test can detect"
    read = f" Reconstructed: {now.read_in_words}; before: {before.read_in_words}."
    others = [f"{k} {before.versions.get(k)} -> {v}" for k, v in now.versions.items() if before.versions.get(k) != v]
    also = [f"the attack was {before.attack} and is {now.attack}"] if before.attack != now.attack else []
    note = f" ({'; '.join([*others, *also])})" if others or also else ""
    return (
        f"The uploads leak {verdict}: mean {metric.name_within} {metric.digits(old)} -> {metric.digits(new)}{unit}"
        f" ({change.mean:+.2g}{unit}, 95 % interval {low:+.2g} to {high:+.2g}; p = {p:.2g}, {change.groups} independent"
        f" groups of uploads){note}.{read}"
    )


def expect_enough(uploads: Sequence[int]) -> None:
    """Raise ``UserError`` for images of fewer than ``FEWEST`` different ``uploads``."""
    if (found := len(set(uploads))) < FEWEST:
        raise UserError(
            f"At least {FEWEST} independent uploads are expected in both measurements, but got {found}: with fewer no"
            " rise could be distinguished from chance; attack more images, or smaller batches."
        )


FORMAT, MOST_BYTES = 1, 1 << 24

_KINDS: Mapping[str, Any] = {
    "metric": str,
    "attack": str,
    "values": list[float],
    "uploads": list[int],
    "victims": str,
    "versions": Mapping[str, str],
}


def read_baseline(path: Path) -> dict[str, Measurement]:
    """Return the measurements in the file ``path`` by name; empty without a file.

    Raises:
        UserError: it is damaged, or has another format.
    """
    if not path.is_file():
        return {}
    wrong = UserError(
        f"{path} is expected to be a baseline as `pytest --fl-privacy-update` or `fl-privacy check-leakage --update`"
        " write it, but is damaged; write it anew."
    )
    try:
        content = json.loads(path.read_text()) if path.stat().st_size <= MOST_BYTES else None
    except (ValueError, RecursionError) as error:
        raise wrong from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("tests"), dict):
        raise wrong
    return {name: _read(entry, wrong) for name, entry in content["tests"].items()}


def write_baseline(path: Path, measurements: Mapping[str, Measurement]) -> None:
    """Write the file of ``read_baseline``, with mean and interval for human readers."""
    tests = {}
    for name, measurement in sorted(measurements.items()):
        found = measurement.statistic
        seen = {"mean": found.mean, "ci95": found.ci95, "images": found.n, "independent_uploads": found.groups}
        tests[name] = {**seen, **asdict(measurement)}
    write_whole(path, json.dumps({"format": FORMAT, "tests": tests}, indent=1) + "\n")


def _read(entry: Any, wrong: UserError) -> Measurement:
    if not isinstance(entry, dict) or any(not fits(entry.get(name), kind) for name, kind in _KINDS.items()):
        raise wrong
    if not entry["values"] or len(entry["values"]) != len(entry["uploads"]) or entry["metric"] not in METRICS:
        raise wrong
    chosen: dict[str, Any] = {name: entry[name] for name in _KINDS} | {"read": entry.get("read")}
    if not fits(chosen["read"], int | None) or not 0 <= (chosen["read"] or 0) <= len(entry["values"]):
        raise wrong
    chosen |= {name: tuple(entry[name]) for name in ("values", "uploads")}
    return Measurement(**chosen)
