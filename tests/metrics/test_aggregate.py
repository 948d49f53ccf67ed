import math

import numpy as np
import pytest
from scipy import stats

from fl_privacy.metrics import THRESHOLDS, aggregate, pmm


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
    leaks = {threshold.metric: threshold.is_leak for threshold in THRESHOLDS}
    assert leaks["psnr"](15.0) and not leaks["psnr"](14.9)
    assert leaks["lpips"](0.04) and not leaks["lpips"](0.05)
    assert leaks["mse"](0.05) is False and leaks["mse"](0.01)
