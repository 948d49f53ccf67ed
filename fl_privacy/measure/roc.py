"""ROC curves and other measures of how well scores distinguish members, and their bounds under differential privacy."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.measure.intervals import binomial_lower, binomial_upper, share_interval

Scores = NDArray[np.float64]
Gain = Callable[[Scores, Scores], Scores]  # (TPR, FPR) -> objective to maximize
RESAMPLES = 1000  # number of bootstrap samples
Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated value with its 95 % confidence interval, and the value expected by chance."""

    value: float
    low: float
    high: float
    chance: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Separation:
    """Scores of members, ``positives`` (P,), and of others, ``negatives`` (N,), whose difference is measured."""

    positives: Scores
    negatives: Scores
    seed: int = 0  # seed of bootstrap samples, and of the halves on which a threshold is chosen and judged

    def halves(self) -> tuple["Separation", "Separation"]:
        rng = np.random.default_rng(self.seed)
        own, other = (scores[rng.permutation(len(scores))] for scores in (self.positives, self.negatives))
        first = Separation(positives=own[::2], negatives=other[::2], seed=self.seed)
        return first, Separation(positives=own[1::2], negatives=other[1::2], seed=self.seed)

    def rates(self, threshold: float) -> tuple[float, float]:
        return float((self.positives > threshold).mean()), float((self.negatives > threshold).mean())


def curve(found: Separation) -> tuple[Scores, Scores]:
    """Return FPR and TPR at every threshold, ascending from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([found.positives, found.negatives]))[::-1]
    fpr = 1 - np.searchsorted(np.sort(found.negatives), thresholds, side="left") / len(found.negatives)
    tpr = 1 - np.searchsorted(np.sort(found.positives), thresholds, side="left") / len(found.positives)
    return np.concatenate([[0.0], fpr]), np.concatenate([[0.0], tpr])


def thinned_curve(found: Separation, points: int = 120) -> tuple[list[float], list[float]]:
    """Return ``curve`` reduced to at most ``points + 1`` points, evenly spaced over the logarithm of the FPR."""
    fpr, tpr = curve(found)
    wanted = np.concatenate([[0.0], np.geomspace(1 / len(found.negatives), 1.0, points)])
    kept = np.unique(np.searchsorted(fpr, wanted + 1e-12, side="right") - 1)
    return fpr[kept].tolist(), tpr[kept].tolist()


def auc(found: Separation) -> Estimate:
    """Return the area under the ROC curve (AUC) with a 95 % interval.

    The interval contains those of DeLong et al. (1988), on the plain and on the logit scale. If their variance is zero,
    as for perfect separation, it is Clopper and Pearson's for the smaller sample.
    """
    positives, negatives = np.sort(found.positives), np.sort(found.negatives)
    of_positives = _share_below(negatives, positives)
    of_negatives = 1 - _share_below(positives, negatives)
    value = float(of_positives.mean())
    spread = sum(float(s.var(ddof=1)) / len(s) for s in (of_positives, of_negatives) if len(s) > 1)
    half = Z95 * math.sqrt(spread)
    low, high = value - half, value + half
    if spread > 0 and 0 < value < 1:
        logit, wide = math.log(value / (1 - value)), half / (value * (1 - value))
        low, high = min(low, _share_of(logit - wide)), max(high, _share_of(logit + wide))
    if spread == 0:  # all alike, as for a curve in the corner: as certain as for the smaller sample
        number = min(len(positives), len(negatives))
        low, high = share_interval(round(value * number), number)
    return Estimate(value=value, low=max(0.0, low), high=min(1.0, high), chance=0.5)


def _share_of(logit: float) -> float:
    return 0.5 * (1 + math.tanh(logit / 2))


def tpr_at(found: Separation, fpr: float) -> Estimate | None:
    """Return the TPR at the false positive rate ``fpr``; ``None`` if 1 / ``fpr`` exceeds the number of negatives."""
    allowed = math.floor(fpr * len(found.negatives) + 1e-9)
    if allowed < 1:
        return None
    place = len(found.negatives) - 1 - allowed
    positives, rng = np.sort(found.positives), np.random.default_rng(found.seed)
    number = len(positives)

    def above(thresholds: Scores) -> Scores:
        return 1 - np.searchsorted(positives, thresholds, side="right") / number

    if place < 0:
        return Estimate(value=1.0, low=1.0, high=1.0, chance=fpr)
    value = float(above(np.sort(found.negatives)[place : place + 1])[0])
    thresholds = np.partition(rng.choice(found.negatives, (RESAMPLES, len(found.negatives))), place, axis=1)[:, place]
    low, high = np.quantile(rng.binomial(number, above(thresholds)) / number, [0.025, 0.975])
    exact = share_interval(round(value * number), number)
    return Estimate(value=value, low=min(float(low), exact[0]), high=max(float(high), exact[1]), chance=fpr)


def balanced_accuracy(found: Separation) -> Estimate:
    """Return the mean of TPR and TNR, with each half of the examples judged at the other half's best threshold."""
    tpr, fpr = _cross_fitted(found, lambda t, f: t - f)
    positives, negatives = len(found.positives), len(found.negatives)
    value = (tpr + 1 - fpr) / 2
    half = Z95 * math.sqrt((_variance(tpr, positives) + _variance(fpr, negatives)) / 4)
    return Estimate(value=value, low=max(0.0, value - half), high=min(1.0, value + half), chance=0.5)


def threshold_success(found: Separation) -> Estimate:
    """Return the share of right decisions on membership; each half is judged at the best threshold of the other."""
    positives, negatives = len(found.positives), len(found.negatives)
    number, share = positives + negatives, positives / (positives + negatives)
    tpr, fpr = _cross_fitted(found, lambda t, f: share * t + (1 - share) * (1 - f))
    return answer_success(round(tpr * positives + (1 - fpr) * negatives), number, majority=max(share, 1 - share))


def answer_success(right: int, number: int, *, majority: float) -> Estimate:
    """Return the share of right answers; chance is ``majority``, the share of the most frequent answer."""
    low, high = share_interval(right, number)
    return Estimate(value=right / number, low=low, high=high, chance=majority)


def correlation(guessed: Scores, true: Scores, *, seed: int) -> Estimate:
    """Return the correlation of all values of two tables (N, K), with an interval from a bootstrap over rows."""

    def of(rows: NDArray[np.int64]) -> Scores:
        one, other = guessed[rows].reshape(len(rows), -1), true[rows].reshape(len(rows), -1)
        one, other = one - one.mean(1, keepdims=True), other - other.mean(1, keepdims=True)
        norms = np.sqrt(np.square(one).sum(1) * np.square(other).sum(1))
        return np.asarray((one * other).sum(1) / np.where(norms > 0, norms, np.inf))

    everything = np.arange(len(true))[None]
    drawn = np.random.default_rng(seed).integers(len(true), size=(RESAMPLES, len(true)))
    value, (low, high) = float(of(everything)[0]), np.quantile(of(drawn), [0.025, 0.975])
    return Estimate(value=value, low=min(value, float(low)), high=max(value, float(high)), chance=0.0)


def _cross_fitted(found: Separation, gain: Gain) -> tuple[float, float]:
    first, second = found.halves()
    true = false = 0.0
    for chosen_on, judged_on in ((first, second), (second, first)):
        false_rates, true_rates = curve(chosen_on)
        tpr, fpr = judged_on.rates(_threshold(chosen_on, int(np.argmax(gain(true_rates, false_rates)))))
        true += tpr * len(judged_on.positives)
        false += fpr * len(judged_on.negatives)
    return true / len(found.positives), false / len(found.negatives)


def _threshold(found: Separation, place: int) -> float:
    ordered = np.unique(np.concatenate([found.positives, found.negatives]))[::-1]
    if place == 0:
        return math.inf
    return float(ordered[place]) if place < len(ordered) else -math.inf


def _share_below(sample: Scores, values: Scores) -> Scores:
    left, right = (np.searchsorted(sample, values, side=side) for side in ("left", "right"))
    return (left + right) / 2 / len(sample)


def _variance(share: float, number: int) -> float:
    moved = (share * number + 2) / (number + 4)
    return moved * (1 - moved) / (number + 4)


CONFIDENCE = 0.95
LARGE_EPSILON, LARGE_DELTA = 10.0, 0.01  # largest epsilon and delta that count as protection


def promises_little(*, epsilon: float, delta: float) -> bool:
    """Return whether (epsilon, delta) is too large to count as protection (Ponomareva et al. 2023, sec. 5.2)."""
    return not (epsilon <= LARGE_EPSILON and delta <= LARGE_DELTA)


def tpr_bound(fpr: Scores, *, epsilon: float, delta: float) -> Scores:
    """Return the largest TPR that (epsilon, delta)-privacy allows at each FPR (Kairouz et al. 2015, Thm. 2.1)."""
    grows = math.exp(min(epsilon, 700.0))
    return np.clip(np.minimum(grows * fpr + delta, 1 - (1 - delta - fpr) / grows), 0.0, 1.0)


def auc_bound(*, epsilon: float, delta: float) -> float:
    """Return the largest AUC that (epsilon, delta)-privacy allows."""
    fpr = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 20_000)])
    tpr = tpr_bound(fpr, epsilon=epsilon, delta=delta)
    return float(((tpr[1:] + tpr[:-1]) / 2 * np.diff(fpr)).sum())


def balanced_accuracy_bound(*, epsilon: float, delta: float) -> float:
    """Return the largest mean of TPR and TNR that (epsilon, delta)-privacy allows."""
    return 1 - (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))


def identification_bound(*, epsilon: float, delta: float, candidates: int) -> float:
    """Return the largest probability that an attacker identifies the right example despite (epsilon, delta)-privacy.

    It is e^epsilon / (candidates + 1) + delta (Kairouz et al. 2015), if the example and the other ``candidates``, at
    least 1, are equally likely. It also holds for reconstruction (Hayes, Mahloujifar and Balle 2023, Thm. 2).

    >>> round(identification_bound(epsilon=1.0, delta=1e-5, candidates=1000), 4)
    0.0027
    """
    return float(tpr_bound(np.asarray(1 / (candidates + 1)), epsilon=epsilon, delta=delta))


def proven_epsilon(found: Separation, *, delta: float) -> float:
    """Return the lower bound on epsilon, given ``delta``, that the scores prove with 95 % confidence; at least 0."""
    # the threshold is chosen on one half of the examples; on the other half, both rates are bounded as by Clopper and
    # Pearson, with an error of 2.5 % each (Nasr et al. 2021, "Adversary instantiation")
    chosen_on, judged_on = found.halves()
    best, threshold, side = 0.0, math.inf, True
    fpr, tpr = curve(chosen_on)
    for above in (True, False):
        values = _promised(chosen_on, tpr, fpr, above, delta)
        if values.max() > best:
            best, threshold, side = float(values.max()), _threshold(chosen_on, int(np.argmax(values))), above
    hit, miss = (np.array([rate]) for rate in judged_on.rates(threshold))
    return float(_promised(judged_on, hit, miss, side, delta)[0])


def _promised(found: Separation, tpr: Scores, fpr: Scores, above: bool, delta: float) -> Scores:
    # hits: positives above the threshold (if above), or negatives below it; rates are replaced by confidence bounds
    hits, misses = (tpr, fpr) if above else (1 - fpr, 1 - tpr)
    sizes = [len(found.positives), len(found.negatives)][:: 1 if above else -1]
    error = (1 - CONFIDENCE) / 2
    least = binomial_lower(np.rint(hits * sizes[0]), sizes[0], error)
    largest = binomial_upper(np.rint(misses * sizes[1]), sizes[1], error)
    with np.errstate(divide="ignore", invalid="ignore"):
        promised: Scores = np.maximum(0.0, np.log(np.maximum(least - delta, 1e-300) / largest))
        return promised


@dataclass(frozen=True, kw_only=True)
class Measure(Estimate):
    """Estimate of an attack's success; ``bound``: largest value that the clients' differential privacy allows."""

    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one method of inference about clients, such as membership inference: figures and a ROC curve."""

    about: str  # question of the attack, one of ``fl_privacy.attacks.inference.About``
    method: str
    title: str
    source: str = ""
    rounds: int = 0  # number of observed rounds
    last_round: int = 0
    positives: int = 0  # number of queries with the answer yes, or of all queries with several possible answers
    negatives: int = 0  # number of queries with the answer no
    measures: Mapping[str, Measure] = field(default_factory=dict)  # figures by name, see ``report.inferred``
    fpr: Sequence[float] = ()  # (P,) ascending false positive rates of a ROC curve; may be empty
    tpr: Sequence[float] = ()  # (P,) true positive rates of the curve
    epsilon: float | None = None  # epsilon spent up to the last round; ``None`` without guarantee
    delta: float | None = None
    proven_epsilon: float | None = None  # largest epsilon that the attack disproves
    notes: Sequence[str] = ()
    failure: str | None = None
    seconds: float | None = None  # time of all attacks on the question, without scoring

    def as_record(self) -> dict[str, Any]:
        measures = {name: [m.value, m.low, m.high, m.chance, m.bound] for name, m in self.measures.items()}
        lists = {"fpr": list(self.fpr), "tpr": list(self.tpr), "notes": list(self.notes)}
        return {**asdict(self), "measures": measures, **lists}


FINDING: dict[str, Any] = {
    **{field.name: field.type for field in fields(Finding)},
    "measures": Mapping[str, list[float | None]],
}
"""Fields of an ``inference`` record, and their types."""


def finding_of(record: Mapping[str, Any]) -> Finding:
    """Convert a saved ``inference`` record to a :class:`Finding`, without measures that lack a value."""
    measures = {
        name: Measure(value=v[0], low=v[1], high=v[2], chance=v[3], bound=v[4])
        for name, v in record["measures"].items()
        if len(v) == 5 and None not in v[:4]
    }
    return Finding(measures=measures, **{name: record[name] for name in FINDING if name != "measures"})
