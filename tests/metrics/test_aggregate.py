import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fl_privacy.measure import METRICS, aggregate, pmm, share_at_most
from fl_privacy.measure.intervals import is_split, share_interval
from fl_privacy.report.words import MISSING, interval


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


def test_the_interval_of_unequal_groups_is_that_of_bell_and_mccaffrey():
    """CR2 and Satterthwaite's degrees of freedom as they are printed, by matrices."""
    values, groups = np.random.default_rng(0).normal(size=31), np.repeat(np.arange(5), [1, 2, 4, 8, 16])
    hat = np.full((31, 31), 1 / 31)
    residuals, variance, vectors = (np.eye(31) - hat) @ values, 0.0, []
    for group in range(5):
        own = np.flatnonzero(groups == group)
        powers, base = np.linalg.eigh(np.eye(len(own)) - hat[np.ix_(own, own)])
        adjusted = base @ np.diag(powers**-0.5) @ base.T @ np.ones(len(own)) / 31
        variance += float(adjusted @ residuals[own]) ** 2
        vectors.append((np.eye(31) - hat)[:, own] @ adjusted)
    roots = np.linalg.eigvalsh(np.array(vectors) @ np.array(vectors).T)
    freedom = roots.sum() ** 2 / np.square(roots).sum()
    expected = stats.t.interval(0.95, freedom, loc=values.mean(), scale=math.sqrt(variance))
    assert aggregate(values, groups=groups.tolist()).ci95 == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [[1, 2, 3, 4] * 3, [1, 1, 4, 4, 8, 8], [1, 2, 4, 8, 16, 32], [1, 1, 1, 1, 1, 20]])
def test_the_interval_of_groups_holds_what_it_promises(sizes):
    rng, groups = np.random.default_rng(2), np.repeat(np.arange(len(sizes)), sizes).tolist()
    covered, naive = 0, 0
    for _ in range(600):
        values = rng.normal(0, 2, len(sizes))[groups] + rng.normal(0, 1, len(groups))
        for kind in (groups, None):
            low, high = aggregate(values, groups=kind).ci95
            if kind:
                covered += low < 0 < high
            else:
                naive += low < 0 < high
    assert 0.92 < covered / 600 < 0.98 and naive / 600 < 0.9


@pytest.mark.parametrize("number", [4, 5, 8])
def test_intervals_of_shares_of_few_hold_what_they_promise(number):
    for share in np.linspace(0.02, 0.98, 25):
        weights = stats.binom.pmf(range(number + 1), number, share)
        two = [low <= share <= high for low, high in (share_interval(k, number) for k in range(number + 1))]
        one = [share <= share_at_most(k, number) for k in range(number + 1)]
        assert weights @ two >= 0.95 and weights @ one >= 0.95


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


def test_a_few_exact_ones_among_many_bad_ones_have_a_median_and_no_interval():
    rng = np.random.default_rng(0)
    bad = rng.normal(12, 3, 17).tolist()
    assert is_split([*bad, 95.0, 100.0], groups=19) and is_split([*bad, math.inf], groups=18)
    assert not is_split([*bad, 95.0, 100.0], groups=2), "two uploads"
    assert not is_split([*bad[:8], *([95.0] * 8)], groups=16), "as many of both"
    assert not is_split([0.0] * 17 + [1.0], groups=18), "a share"
    assert sum(is_split(rng.normal(size=12).tolist(), groups=12) for _ in range(300)) <= 3
    statistic = replace(aggregate([*bad, 100.0]), ci95=None)
    assert interval(statistic, "psnr").startswith("median 1") and interval(aggregate([1.0]), "psnr") == MISSING
