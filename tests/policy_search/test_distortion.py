import sys

import pytest
import torch

from fl_privacy.data.transformations import read_policies
from fl_privacy.defenses.policy_search import altered_shares, fsim_scores, transformed_by
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator

POLICIES = read_policies(["39", "14", "3"])  # color by a factor of 1, sharpness, a shift by nearly half the side


def images(channels):
    coarse = torch.rand(4, channels, 6, 6, generator=derive_generator(0))
    smooth = torch.nn.functional.interpolate(coarse, 32, mode="bicubic").clamp(0, 1)
    return (smooth * 255).round() / 255


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_left_alone_is_alike_and_what_is_shifted_is_not(channels):
    piq = pytest.importorskip("piq")
    given = images(channels)
    same, sharpened, shifted = fsim_scores(given, POLICIES, seed=0)
    assert same == pytest.approx(1.0)
    assert 1 > sharpened > shifted
    expected = piq.fsim(given, transformed_by(given, POLICIES[2], 0), data_range=1.0, chromatic=channels == 3)
    assert shifted == pytest.approx(float(expected), abs=0.02)


IDLE = {
    1: ["12", "20", "27", "34", "28", "39", "8", "0-29", "47-12-0"],
    3: ["28", "39", "0-29", "39-28", "4"],
}
"""Color on grey images and at level 0, solarize at level 0, autocontrast of all levels, twice inverted, a breath of
sharpness."""


@pytest.mark.parametrize("channels", [1, 3])
def test_finds_the_policies_that_leave_images_as_they_are(channels):
    given = images(channels)
    given[:, :, 0, 0], given[:, :, 0, 1] = 0, 1
    assert altered_shares(given, read_policies(IDLE[channels]), seed=0) == [0.0] * len(IDLE[channels])
    assert altered_shares(given, read_policies(["3", "15", "0", "37", "9"]), seed=0) == [1.0] * 5
    half = torch.cat([given[:2], torch.zeros_like(given[:2])])
    assert altered_shares(half, read_policies(["3"]), seed=0) == [0.5]


def test_without_the_package_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "piq", None)
    with pytest.raises(UserError, match=r"pip install 'piq'") as error:
        fsim_scores(images(1), POLICIES, seed=0)
    assert "\n" not in str(error.value)
