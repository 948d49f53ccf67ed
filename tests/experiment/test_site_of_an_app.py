"""What another site computes of an app's replies."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fl_privacy.auditing.instrument.matching import Matched
from fl_privacy.auditing.scenario_problem import WatchedReply, seen_by_site
from fl_privacy.auditing.scenarios import Scenarios

BEFORE = torch.linspace(-1, 1, 50)


def reply(change: float, shares: str) -> WatchedReply:
    moved = change * torch.linspace(1, 2, 50)
    array = (BEFORE + moved if shares == "weights" else moved).numpy()
    watched: Any = SimpleNamespace(before={"w": BEFORE})
    return WatchedReply(
        reply={"arrays/w": array}, watched=watched, matched=Matched(parameters={"arrays/w": "w"}, shares=shares)
    )


@pytest.mark.parametrize("shares", ["weights", "delta", "gradient"])
@pytest.mark.parametrize("others", [1, 4])
def test_the_others_mean_reply_is_left_up_to_rounding(shares: str, others: int) -> None:
    again, own = reply(0.01, shares), reply(-0.03, shares)
    found, truth = seen_by_site(again, own, others).tensors()["w"], again.tensors()["w"]
    wrong = (found - truth).abs().max()
    assert 0 < float(wrong) < 1e-6 * (1 + 1 / others)


def test_a_federation_of_one_has_no_other_site() -> None:
    ladder = Scenarios(clients=(), attack=None, sites=1)  # type: ignore[arg-type]
    answer = ladder._of_site([], "")
    assert answer.counts is None
    assert "no other site" in answer.reason


def test_arrays_of_a_reply_stay_as_they_are() -> None:
    again = reply(0.01, "weights")
    kept = again.reply["arrays/w"].copy()
    seen_by_site(again, reply(0.5, "weights"), 1)
    assert np.array_equal(again.reply["arrays/w"], kept)
