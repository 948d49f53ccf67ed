"""How well scores tell two kinds of examples apart: ROC curves and what is read from them, with intervals.

Scores are higher for positives (members). Thresholds that are chosen by the data are judged on other data: the examples
are cut into halves, and what is chosen on one is applied to the other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_privacy.metrics.intervals import share_interval

Scores = NDArray[np.float64]

Gain = Callable[[Scores, Scores], Scores]
"""(TPR, FPR) -> what is to be largest."""

RESAMPLES = 1000
"""Of the bootstrap."""

Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 95 % confidence interval, beside what guessing gives."""

    value: float
    low: float
    high: float
    chance: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Separation:
    """Scores of two kinds of examples.

    Attributes:
        positives: (P,) of members.
        negatives: (N,) of others.
        seed: of resampling and of the cut into halves.
    """

    positives: Scores
    negatives: Scores
    seed: int = 0

    def halves(self) -> tuple["Separation", "Separation"]:
        """A cut at random."""
        rng = np.random.default_rng(self.seed)
        cut = []
        for scores in (self.positives, self.negatives):
            order = rng.permutation(len(scores))
            cut.append((scores[order[::2]], scores[order[1::2]]))
        (p1, p2), (n1, n2) = cut
        return Separation(positives=p1, negatives=n1, seed=self.seed), Separation(
            positives=p2, negatives=n2, seed=self.seed
        )

    def rates(self, threshold: float) -> tuple[float, float]:
        """TPR and FPR of calling positive what is above ``threshold``."""
        return float((self.positives > threshold).mean()), float((self.negatives > threshold).mean())


def curve(found: Separation) -> tuple[Scores, Scores]:
    """FPR and TPR at every threshold, ascending from (0, 0) to (1, 1); ties are one step."""
    thresholds = np.unique(np.concatenate([found.positives, found.negatives]))[::-1]
    fpr = 1 - np.searchsorted(np.sort(found.negatives), thresholds, side="left") / len(found.negatives)
    tpr = 1 - np.searchsorted(np.sort(found.positives), thresholds, side="left") / len(found.positives)
    return np.concatenate([[0.0], fpr]), np.concatenate([[0.0], tpr])


def thinned_curve(found: Separation, points: int = 120) -> tuple[list[float], list[float]]:
    """Some points of ``curve`` from end to end, evenly spread over the logarithm of the FPR."""
    fpr, tpr = curve(found)
    wanted = np.concatenate([[0.0], np.geomspace(1 / len(found.negatives), 1.0, points)])
    kept = np.unique(np.searchsorted(fpr, wanted + 1e-12, side="right") - 1)
    return fpr[kept].tolist(), tpr[kept].tolist()


def auc(found: Separation) -> Estimate:
    """Area under the curve, with the interval of DeLong, DeLong and Clarke-Pearson (1988)."""
    positives, negatives = np.sort(found.positives), np.sort(found.negatives)
    of_positives = _share_below(negatives, positives)
    of_negatives = 1 - _share_below(positives, negatives)
    value = float(of_positives.mean())
    spread = sum(float(s.var(ddof=1)) / len(s) for s in (of_positives, of_negatives) if len(s) > 1)
    low, high = value - Z95 * math.sqrt(spread), value + Z95 * math.sqrt(spread)
    if spread == 0:  # all alike, as of a curve in the corner: as sure as of the smaller sample
        number = min(len(positives), len(negatives))
        low, high = share_interval(round(value * number), number)
    return Estimate(value=value, low=max(0.0, low), high=min(1.0, high), chance=0.5)


def tpr_at(found: Separation, fpr: float) -> Estimate | None:
    """The largest TPR at an FPR of at most ``fpr``; ``None`` with so few negatives that one of them is more.

    The interval is the wider one of the bootstrap over both kinds and of Clopper and Pearson at this threshold.
    """
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
    drawn = rng.choice(found.negatives, (RESAMPLES, len(found.negatives)))
    thresholds = np.partition(drawn, place, axis=1)[:, place]
    resampled = rng.binomial(number, above(thresholds)) / number
    low, high = np.quantile(resampled, [0.025, 0.975])
    exact = share_interval(round(value * number), number)
    return Estimate(value=value, low=min(float(low), exact[0]), high=max(float(high), exact[1]), chance=fpr)


def balanced_accuracy(found: Separation) -> Estimate:
    """Mean of TPR and TNR at thresholds that are best on the other half."""
    tpr, fpr = _cross_fitted(found, lambda t, f: t - f)
    positives, negatives = len(found.positives), len(found.negatives)
    value = (tpr + 1 - fpr) / 2
    spread = (_variance(tpr, positives) + _variance(fpr, negatives)) / 4
    half = Z95 * math.sqrt(spread)
    return Estimate(value=value, low=max(0.0, value - half), high=min(1.0, value + half), chance=0.5)


def threshold_success(found: Separation) -> Estimate:
    """Share of right answers (ASR) at thresholds that are best on the other half, beside the majority guess."""
    positives, negatives = len(found.positives), len(found.negatives)
    number, share = positives + negatives, positives / (positives + negatives)
    tpr, fpr = _cross_fitted(found, lambda t, f: share * t + (1 - share) * (1 - f))
    right = round(tpr * positives + (1 - fpr) * negatives)
    low, high = share_interval(right, number)
    return Estimate(value=right / number, low=low, high=high, chance=max(share, 1 - share))


def answer_success(right: int, number: int, *, majority: float) -> Estimate:
    """Share of right answers (ASR), beside ``majority``: that of always saying what is most frequent."""
    low, high = share_interval(right, number)
    return Estimate(value=right / number, low=low, high=high, chance=majority)


def correlation(guessed: Scores, true: Scores, *, seed: int) -> Estimate:
    """Of two tables (N, K), with the bootstrap interval over the rows, which are independent."""

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
        tpr, fpr = judged_on.rates(_best_threshold(chosen_on, gain))
        true += tpr * len(judged_on.positives)
        false += fpr * len(judged_on.negatives)
    return true / len(found.positives), false / len(found.negatives)


def _best_threshold(found: Separation, gain: Gain) -> float:
    fpr, tpr = curve(found)
    best = int(np.argmax(gain(tpr, fpr)))
    ordered = np.unique(np.concatenate([found.positives, found.negatives]))[::-1]
    if best == 0:
        return math.inf
    return float(ordered[best]) if best < len(ordered) else -math.inf


def _share_below(sample: Scores, values: Scores) -> Scores:
    """Share of the sorted ``sample`` below each of ``values``, ties counting half."""
    left, right = (np.searchsorted(sample, values, side=side) for side in ("left", "right"))
    return (left + right) / 2 / len(sample)


def _variance(share: float, number: int) -> float:
    """Of a share, by Agresti and Coull: never zero."""
    moved = (share * number + 2) / (number + 4)
    return moved * (1 - moved) / (number + 4)
