"""How numbers are shown."""

from fl_privacy.measure import Statistic
from fl_privacy.report.words import interval, title_within


def test_no_zero_is_negative() -> None:
    assert (
        interval(Statistic(mean=0.0, ci95=(-0.0001, 0.0004), n=2, groups=2, median=0.0, min=0.0, max=0.0), "lpips")
        == "[0.000, 0.000]"
    )


def test_a_title_within_a_sentence_begins_small_unless_it_is_an_abbreviation() -> None:
    assert [title_within(name) for name in ("cells_right", "psnr", "mse", "rmse", "label_correct")] == [
        "cells right", "PSNR", "MSE", "rMSE", "label accuracy"
    ]  # fmt: skip
