import math

import numpy as np
import pytest
from scipy import stats

from fl_privacy.metrics import METRICS, aggregate, pmm, share_at_most


def test_interval_is_that_of_students_t():
    values = np.random.default_rng(0).normal(12, 3, size=17)
    low, high = stats.t.interval(0.95, 16, loc=values.mean(), scale=stats.sem(values))
    found = aggregate(values)
    assert found.ci95 == pytest.approx((low, high))
    assert (found.mean, found.median, found.n) == (pytest.approx(values.mean()), pytest.approx(np.median(values)), 17)
    assert (found.min, found.max) == (values.min(), values.max())


def test_samples_without_an_interval():
    assert aggregate([3.0]).ci95 is None
    assert aggregate([3.0, math.inf]).ci95 is None and aggregate([3.0, math.inf]).mean == math.inf
    assert aggregate([3.0, math.nan]).n == 1
    assert aggregate([math.nan]) is None and aggregate([]) is None


def test_pmm_is_the_share_of_accuracy_kept():
    assert pmm(0.6, 0.8) == pytest.approx(75)
    assert math.isnan(pmm(0.6, 0))


def test_thresholds_tell_leaks_from_private_images():
    leaks = {name: metric.is_leak for name, metric in METRICS.items()}
    assert [n for n, metric in METRICS.items() if metric.threshold] == [
        *("psnr", "ssim", "lpips", "mse", "noise_ratio"),
        *("transformed_psnr", "token_f1", "word_f1"),
    ]
    assert not leaks["bpki"](1e9), "nobody says from where on"
    assert leaks["psnr"](15.0) and not leaks["psnr"](14.9)
    assert leaks["lpips"](0.04) and not leaks["lpips"](0.05)
    assert leaks["mse"](0.05) is False and leaks["mse"](0.01)


def test_the_interval_of_equal_groups_is_that_of_their_means():
    rng = np.random.default_rng(1)
    values = rng.normal(20, 2, size=(9, 1)) + rng.normal(0, 0.3, size=(9, 4))
    found = aggregate(values.ravel(), groups=np.repeat(np.arange(9), 4).tolist())
    means = values.mean(1)
    assert found.ci95 == pytest.approx(stats.t.interval(0.95, 8, loc=means.mean(), scale=stats.sem(means)))
    assert (found.n, found.groups) == (36, 9)
    alone = aggregate(values.ravel())
    assert found.ci95[1] - found.ci95[0] > 1.5 * (alone.ci95[1] - alone.ci95[0])


def test_the_interval_of_unequal_groups_is_that_of_the_sandwich():
    values, groups = [1.0, 2.0, 4.0, 8.0, 16.0, 3.0], ["a", "a", "a", "b", "b", "c"]
    design, outcome = np.ones((6, 1)), np.asarray(values)
    bread = np.linalg.inv(design.T @ design)
    residuals = outcome - outcome.mean()
    scores = [design[np.asarray(groups) == g].T @ residuals[np.asarray(groups) == g] for g in "abc"]
    robust = (3 / 2 * bread @ sum(np.outer(s, s) for s in scores) @ bread).item()
    expected = stats.t.interval(0.95, 2, loc=outcome.mean(), scale=math.sqrt(robust))
    assert aggregate(values, groups=groups).ci95 == pytest.approx(expected)


def test_the_interval_of_groups_holds_what_it_promises():
    rng = np.random.default_rng(2)
    groups = np.repeat(np.arange(12), [1, 2, 3, 4] * 3).tolist()
    covered, naive = 0, 0
    for _ in range(1000):
        values = rng.normal(0, 1, 12)[groups] + rng.normal(0, 0.2, len(groups))
        for kind in (groups, None):
            low, high = aggregate(values, groups=kind).ci95
            if kind:
                covered += low < 0 < high
            else:
                naive += low < 0 < high
    assert 0.90 < covered / 1000 < 0.97 and naive / 1000 < 0.88


def test_the_same_image_twice_is_one_image():
    values = [10.0, 12.0, 17.0]
    once, twice = aggregate(values), aggregate(values * 2, groups=[0, 1, 2] * 2)
    assert twice.ci95 == pytest.approx(once.ci95) and twice.groups == 3 and twice.n == 6
    assert aggregate([1.0, 2.0], groups=["x", "x"]).ci95 is None
    assert aggregate([1.0, math.nan, 3.0], groups=[0, 1, 0]).groups == 1


def test_no_interval_goes_beyond_what_a_value_can_be():
    assert aggregate([0.9, 1.0], within=METRICS["ssim"].range).ci95[1] == 1.0
    assert aggregate([0.001, 0.02], within=METRICS["lpips"].range).ci95[0] == 0.0
    assert aggregate([0.9, 1.0]).ci95[1] > 1


def test_what_was_not_seen_may_still_be_there():
    for count, n in ((0, 10), (3, 10), (1, 2)):
        expected = stats.binomtest(count, n, alternative="less").proportion_ci(0.95).high
        assert share_at_most(count, n) == pytest.approx(expected)
    assert share_at_most(10, 10) == 1.0
    assert share_at_most(0, 12, groups=3) == pytest.approx(share_at_most(0, 3))
    assert share_at_most(1, 12, groups=3) == pytest.approx(share_at_most(1, 3))
