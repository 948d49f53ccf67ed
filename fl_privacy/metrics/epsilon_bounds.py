"""What (epsilon, delta) allows a membership attack, and which epsilon an attack disproves."""

import math

import numpy as np

from fl_privacy.metrics.intervals import binomial_lower, binomial_upper
from fl_privacy.metrics.roc import Scores, Separation, curve

CONFIDENCE = 0.95

LARGE_EPSILON, LARGE_DELTA = 10.0, 0.01
"""Above which a guarantee says little of a single example: exp(10) is 22,000, and of one in 100 it says nothing."""


def promises_little(*, epsilon: float, delta: float) -> bool:
    """Whether an (epsilon, delta) of that size must not be taken for protection (Ponomareva et al. 2023, sec. 5.2)."""
    return not (epsilon <= LARGE_EPSILON and delta <= LARGE_DELTA)


def tpr_bound(fpr: Scores, *, epsilon: float, delta: float) -> Scores:
    """The largest TPR that (epsilon, delta)-differential privacy allows at each FPR (Kairouz et al. 2015, Thm. 2.1)."""
    grows = math.exp(min(epsilon, 700.0))
    return np.clip(np.minimum(grows * fpr + delta, 1 - (1 - delta - fpr) / grows), 0.0, 1.0)


def auc_bound(*, epsilon: float, delta: float) -> float:
    """Area under ``tpr_bound``."""
    fpr = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 20_000)])
    tpr = tpr_bound(fpr, epsilon=epsilon, delta=delta)
    return float(((tpr[1:] + tpr[:-1]) / 2 * np.diff(fpr)).sum())


def balanced_accuracy_bound(*, epsilon: float, delta: float) -> float:
    """The largest mean of TPR and TNR that (epsilon, delta) allows."""
    share = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
    return 1 - share


def identification_bound(*, epsilon: float, delta: float, candidates: int) -> float:
    """The largest probability with which (epsilon, delta) lets an attacker name the one example that is in the data.

    Whoever sees nothing names it with the prior 1 / (candidates + 1); who sees all that was released does with at most
    e^epsilon times that plus delta, whatever else it knows: the trade-off of tests between any two data sets (Kairouz
    et al. 2015) at a false positive rate of the prior. It bounds reconstruction up to any event of that prior (Balle,
    Cherubin and Hayes 2022, "Reconstructing Training Data with Informed Adversaries", Thm. 2; Hayes, Mahloujifar and
    Balle 2023, "Bounding Training Data Reconstruction in DP-SGD", Thm. 2).

    Args:
        epsilon: of the guarantee.
        delta: likewise.
        candidates: others among which the example is, at least 1; each is equally likely before.

    >>> round(identification_bound(epsilon=1.0, delta=1e-5, candidates=1000), 4)
    0.0027
    """
    prior = np.asarray(1 / (candidates + 1))
    return float(tpr_bound(prior, epsilon=epsilon, delta=delta))


def proven_epsilon(found: Separation, *, delta: float) -> float:
    """The largest epsilon that the attack disproves at ``delta`` with 95 % confidence; 0 where it disproves none.

    On one half of the examples the threshold that promises most is chosen, by calling positive what is above or calling
    negative what is not; on the other half the rates are bounded by Clopper and Pearson, either error with half of
    5 % (Nasr et al. 2021, "Adversary instantiation").
    """
    chosen_on, judged_on = found.halves()
    best, choice = 0.0, (math.inf, True)
    ordered = np.unique(np.concatenate([chosen_on.positives, chosen_on.negatives]))[::-1]
    fpr, tpr = curve(chosen_on)
    for above in (True, False):
        hits, misses = (tpr, fpr) if above else (1 - fpr, 1 - tpr)
        sizes = len(chosen_on.positives), len(chosen_on.negatives)
        values = _promised(hits, misses, sizes if above else sizes[::-1], delta)
        if values.max() > best:
            place = int(np.argmax(values))
            threshold = math.inf if place == 0 else float(ordered[place]) if place < len(ordered) else -math.inf
            best, choice = float(values.max()), (threshold, above)
    threshold, above = choice
    rates = judged_on.rates(threshold)
    hit, miss = (rates[0], rates[1]) if above else (1 - rates[1], 1 - rates[0])
    sizes = len(judged_on.positives), len(judged_on.negatives)
    return float(_promised(np.array([hit]), np.array([miss]), sizes if above else sizes[::-1], delta)[0])


def _promised(hits: Scores, misses: Scores, sizes: tuple[int, int], delta: float) -> Scores:
    """log((least share of hits - delta) / largest share of misses), at least 0."""
    error = (1 - CONFIDENCE) / 2
    least = binomial_lower(np.rint(hits * sizes[0]), sizes[0], error)
    largest = binomial_upper(np.rint(misses * sizes[1]), sizes[1], error)
    with np.errstate(divide="ignore", invalid="ignore"):
        promised: Scores = np.maximum(0.0, np.log(np.maximum(least - delta, 1e-300) / largest))
        return promised
