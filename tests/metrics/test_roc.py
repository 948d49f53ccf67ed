"""ROC figures beside scipy's and by their definitions; the bounds of differential privacy and what disproves them."""

import numpy as np
import pytest
from scipy import stats

from fl_privacy.measure.roc import (
    Separation,
    auc,
    auc_bound,
    balanced_accuracy,
    balanced_accuracy_bound,
    curve,
    proven_epsilon,
    thinned_curve,
    threshold_success,
    tpr_at,
    tpr_bound,
)


def normal(shift: float, *, members: int = 400, others: int = 300, seed: int = 0) -> Separation:
    rng = np.random.default_rng(seed)
    return Separation(positives=rng.normal(shift, 1, members), negatives=rng.normal(0, 1, others))


def test_auc_is_that_of_mann_and_whitney_with_ties() -> None:
    found = normal(1.0)
    rounded = Separation(positives=found.positives.round(0), negatives=found.negatives.round(0))
    for each in (found, rounded):
        u = stats.mannwhitneyu(each.positives, each.negatives).statistic
        estimate = auc(each)
        assert estimate.value == pytest.approx(u / (len(each.positives) * len(each.negatives)))
        fpr, tpr = curve(each)
        assert np.trapezoid(tpr, fpr) == pytest.approx(estimate.value)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    truth = {"auc": stats.norm.cdf(1 / np.sqrt(2)), "tpr": stats.norm.sf(stats.norm.isf(0.05) - 1)}
    held = {"auc": 0, "tpr": 0}
    for seed in range(60):
        found = normal(1.0, seed=seed)
        for name, estimate in (("auc", auc(found)), ("tpr", tpr_at(found, 0.05))):
            held[name] += estimate.low <= truth[name] <= estimate.high
    assert held["auc"] >= 53 and held["tpr"] >= 53


@pytest.mark.parametrize(("number", "shift"), [(24, 2.0), (24, 3.0), (100, 3.0), (100, 4.0)])
def test_intervals_of_an_auc_near_one_hold_the_truth(number: int, shift: float) -> None:
    truth, rng = stats.norm.cdf(shift / np.sqrt(2)), np.random.default_rng(0)
    drawn = ((rng.normal(shift, 1, number), rng.normal(0, 1, number)) for _ in range(500))
    found = [auc(Separation(positives=members, negatives=others)) for members, others in drawn]
    assert np.mean([one.low <= truth <= one.high for one in found]) >= 0.93


def test_tpr_at_an_fpr_is_the_largest_there_is() -> None:
    found = normal(1.5)
    for rate in (0.01, 0.1):
        fpr, tpr = curve(found)
        assert tpr_at(found, rate).value == pytest.approx(tpr[fpr <= rate + 1e-12].max())
    assert tpr_at(found, 0.001) is None, "one of 300 is more than 0.1 %"


def test_perfect_scores_are_no_certainty() -> None:
    found = Separation(positives=np.arange(10, 20.0), negatives=np.arange(10.0))
    assert auc(found).value == 1.0 and auc(found).low < 0.75
    assert tpr_at(found, 0.1).low < 0.75


def test_scores_without_information_are_at_chance() -> None:
    found = normal(0.0)
    for estimate in (auc(found), balanced_accuracy(found), tpr_at(found, 0.01)):
        assert estimate.low <= estimate.chance <= estimate.high
    success = threshold_success(found)
    assert success.chance == pytest.approx(4 / 7) and success.low < success.chance
    same = Separation(positives=np.zeros(50), negatives=np.zeros(50))
    assert auc(same).value == 0.5 and balanced_accuracy(same).value == 0.5 and tpr_at(same, 0.1).value == 0.0


def test_a_thinned_curve_keeps_its_ends() -> None:
    fpr, tpr = thinned_curve(normal(1.0, members=3000, others=3000))
    assert (fpr[0], fpr[-1], tpr[-1]) == (0.0, 1.0, 1.0)
    assert len(fpr) < 130 and sorted(fpr) == fpr and sorted(tpr) == tpr


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_an_attack_on_randomized_response_disproves_nearly_its_epsilon_and_no_more(epsilon: float) -> None:
    """The mechanism that meets the bound: TPR / FPR = exp(epsilon)."""
    rng, number = np.random.default_rng(1), 20_000
    truthful = np.exp(epsilon) / (1 + np.exp(epsilon))
    positives, negatives = (rng.random(number) < share for share in (truthful, 1 - truthful))
    found = Separation(positives=positives.astype(float), negatives=negatives.astype(float))
    assert 0.8 * epsilon < proven_epsilon(found, delta=0.0) <= epsilon
    assert balanced_accuracy_bound(epsilon=epsilon, delta=0.0) == pytest.approx(truthful)
    assert balanced_accuracy(found).value == pytest.approx(truthful, abs=0.02)
    assert float(tpr_bound(np.array([1 - truthful]), epsilon=epsilon, delta=0.0)[0]) == pytest.approx(truthful)


def test_nothing_is_disproved_by_chance() -> None:
    assert sum(proven_epsilon(normal(0.0, seed=seed), delta=0.0) > 0 for seed in range(40)) <= 4


def test_bounds_grow_from_chance_to_everything() -> None:
    fpr = np.array([0.0, 0.01, 0.5, 1.0])
    assert np.allclose(tpr_bound(fpr, epsilon=0.0, delta=0.0), fpr)
    assert np.allclose(tpr_bound(fpr, epsilon=1e9, delta=0.0), [0, 1, 1, 1])
    assert auc_bound(epsilon=0.0, delta=0.0) == pytest.approx(0.5, abs=1e-3)
    assert auc_bound(epsilon=1.0, delta=1e-5) < auc_bound(epsilon=2.0, delta=1e-5) < 1
