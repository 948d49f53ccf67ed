"""How much work an attack on an app's upload gets."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fl_privacy.auditing.scenarios import LEAST_EVALUATIONS, Scenarios, seconds_of_evaluation


def observed(width: int) -> Any:
    upload, plan = SimpleNamespace(num_examples=2), SimpleNamespace(mode="train", steps=1)
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 2))
    return SimpleNamespace(model=model, upload=upload, plan=plan, input_shape=(3, 8, 8))


def test_an_attack_is_cut_by_its_work_and_not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an app in a sandbox, or on a busy machine, has other pictures on its page."""
    ladder = Scenarios(clients=(), attack="usual", attack_within=lambda number: number, seconds=1.0)  # type: ignore[arg-type, return-value]
    small, large = observed(4), observed(8000)
    torch.manual_seed(0)
    found = [ladder._attack_for([one]) for one in (small, large)]
    assert found[0] == ("usual", ())
    number, (said,) = found[1]
    assert LEAST_EVALUATIONS <= number < 600 and f"{number} of 600 evaluations" in said  # type: ignore[operator]
    clock = itertools.count(step=100)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    assert [ladder._attack_for([one]) for one in (small, large)] == found
    assert seconds_of_evaluation(small) < 0.005 < seconds_of_evaluation(large)
