"""Definition 2: hidden below epsilon dB, but for a share of delta, at a cost of accuracy below gamma."""

import math
from typing import Any

import pytest
import torch

from fl_privacy.defenses.policy_search import PrivacyAware, least_epsilon
from fl_privacy.errors import UserError

READ = [6.0, 8.0, 9.0, 9.5, 31.0]
WANTED: dict[str, Any] = {"epsilon": 10.0, "delta": 0.2, "gamma": 0.05}


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"delta": 0.1}, False),  # one of five is read
        ({"epsilon": 9.5}, False),  # the fourth is not below
        ({"epsilon": 31.5, "delta": 0.0}, True),
        ({"gamma": 0.02}, False),  # which is what it costs
    ],
)
def test_both_requirements_count(changed: dict[str, float], holds: bool) -> None:
    policy = PrivacyAware(**{**WANTED, **changed})
    assert policy.holds(READ, accuracy=0.75, transformed=0.73) == holds
    assert policy.holds(torch.tensor(READ), accuracy=0.5, transformed=0.25) is False


@pytest.mark.parametrize(("delta", "best"), [(0.0, 31.0), (0.2, 9.5), (0.3, 9.5), (0.4, 9.0), (1.0, -math.inf)])
def test_the_least_epsilon_is_the_best_read_image_that_has_to_be_hidden(delta: float, best: float) -> None:
    assert least_epsilon(READ, delta=delta) == best
    above, at = (PrivacyAware(epsilon=e, delta=delta, gamma=1.0) for e in (max(best, 0) + 1e-6, max(best, 0)))
    assert above.holds(READ, accuracy=0.5, transformed=0.5)
    assert at.holds(READ, accuracy=0.5, transformed=0.5) == (delta == 1.0)


def test_an_image_that_was_read_whole_is_not_hidden() -> None:
    assert least_epsilon([math.inf, 5.0], delta=0.0) == math.inf
    assert not PrivacyAware(**{**WANTED, "delta": 0.4}).holds([math.inf, 5.0], accuracy=1.0, transformed=1.0)


@pytest.mark.parametrize("changed", [{"epsilon": math.nan}, {"delta": 1.5}, {"gamma": -0.1}])
def test_values_out_of_range_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(UserError, match="is expected"):
        PrivacyAware(**{**WANTED, **changed})


@pytest.mark.parametrize("psnr", [[], [math.nan, 3.0]])
def test_nothing_attacked_is_no_answer(psnr: list[float]) -> None:
    with pytest.raises(UserError, match="numbers, at least one"):
        least_epsilon(psnr, delta=0.1)
