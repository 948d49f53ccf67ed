"""Whether more leaks than before: the paired test, and the file that it compares with."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import permutation_test

from fl_privacy.auditing.regression import Measurement, compare, read_baseline, write_baseline
from fl_privacy.auditing.regression.measurement import FEWEST, measured, sign_flip_p
from fl_privacy.errors import UserError

COUNT = 12


def measurement(values: np.ndarray, *, each: int = 1, metric: str = "psnr", victims: str = "v") -> Measurement:
    """Of images that were uploaded ``each`` at a time."""
    return measured(
        metric=metric,
        attack="idlg",
        values=values.tolist(),
        uploads=[k // each for k in range(len(values))],
        victims=[f"{victims}{k}" for k in range(len(values))],
    )


def drawn(seed: int, shift: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(10 + shift, 2.0, COUNT)


@pytest.mark.parametrize("seed", range(4))
def test_p_is_that_of_scipy(seed: int) -> None:
    sums = np.random.default_rng(seed).normal(0.3, 1.0, 9)
    expected = permutation_test(
        (sums,), np.mean, permutation_type="samples", alternative="greater", n_resamples=np.inf, vectorized=False
    )
    assert sign_flip_p(sums) == pytest.approx(expected.pvalue, abs=1e-12)


def test_of_many_groups_it_is_estimated_and_never_zero() -> None:
    assert 0 < sign_flip_p(np.full(30, 1.0)) < 0.001
    assert sign_flip_p(np.random.default_rng(0).normal(0, 1, 40)) > 0.05


def test_nothing_changed_is_no_alarm_and_so_is_less() -> None:
    before = measurement(drawn(0))
    same = compare(before, before)
    assert not same.worse and same.p == 1.0 and same.change.mean == 0
    assert "no more than before" in same.sentence
    assert not compare(before, measurement(drawn(0) - 3)).worse
    assert not compare(before, measurement(drawn(0) + 1e-4)).worse, "rounding"


@pytest.mark.parametrize(("metric", "rise"), [("psnr", 3.0), ("mse", -0.2)])
def test_more_is_an_alarm_in_the_direction_of_the_metric(metric: str, rise: float) -> None:
    values = drawn(0) if metric == "psnr" else drawn(0) / 20
    before, now = measurement(values, metric=metric), measurement(values + rise, metric=metric)
    found = compare(before, now)
    assert found.worse and found.p == pytest.approx(2.0**-COUNT)
    assert "more than before" in found.sentence and found.sentence.count("\n") == 0
    assert not compare(now, before).worse


@pytest.mark.long
def test_an_alarm_is_false_as_rarely_as_promised() -> None:
    draw = np.random.default_rng(1)
    alarms = [
        compare(measurement(draw.normal(10, 2, COUNT)), measurement(draw.normal(10, 2, COUNT))).worse
        for _ in range(300)
    ]
    assert np.mean(alarms) < 0.05 + 2 * np.sqrt(0.05 * 0.95 / 300)


def test_images_of_one_upload_count_as_one_group() -> None:
    """Of the uploads then and now: 20 images in fours and ones are five groups."""
    values = np.linspace(8, 12, 20)
    found = compare(measurement(values, each=4), measurement(values + 3))
    assert found.change.groups == 5 and found.p == pytest.approx(2.0**-5)
    with pytest.raises(UserError, match=rf"{FEWEST} independent uploads .* got 4"):
        compare(measurement(values, each=5), measurement(values + 3))


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (measurement(drawn(1), victims="w"), "same images"),
        (measurement(drawn(1)[:10]), "same images"),
        (measurement(drawn(1), metric="ssim"), "is expected to be of ssim, but is of psnr"),
    ],
)
def test_what_can_t_be_compared_is_refused(now: Measurement, line: str) -> None:
    with pytest.raises(UserError, match=line):
        compare(measurement(drawn(0)), now)


def test_an_image_on_which_the_attack_failed_is_no_private_one() -> None:
    values = drawn(0)
    values[3] = np.nan
    with pytest.raises(UserError, match=r"for 1 of 12: the attack failed"):
        measurement(values)


def test_a_baseline_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    assert read_baseline(path) == {}
    kept = {"one": measurement(drawn(0)), "two": measurement(drawn(1), each=2)}
    write_baseline(path, kept)
    assert read_baseline(path) == kept
    low, high = json.loads(path.read_text())["tests"]["one"]["ci95"]
    assert low < drawn(0).mean() < high


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "tests": {}}', '{"format": 1, "tests": {"a": {}}}'])
def test_a_damaged_baseline_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(UserError, match="write it anew"):
        read_baseline(path)
