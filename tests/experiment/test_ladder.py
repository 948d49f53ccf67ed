"""How much work an attack on an app's upload gets."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fl_privacy.auditing.instrument.watch import OnlyExamples
from fl_privacy.auditing.scenario_scores import seconds_of_evaluation
from fl_privacy.auditing.scenarios import LEAST_EVALUATIONS, Scenarios, _on_one
from fl_privacy.federation.replies import Failure
from fl_privacy.measure.answer import Answer, Scenario


def observed(width: int, optimizer: str = "sgd") -> Any:
    upload = SimpleNamespace(num_examples=2)
    plan = SimpleNamespace(mode="train", steps=1, optimizer=optimizer)
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


def test_fewer_uploads_are_attacked_if_each_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = SimpleNamespace(observed_reply=lambda number, again, uploaded: again.observed)
    monkeypatch.setattr("fl_privacy.auditing.scenarios.read_problem", lambda watched, inputs: problem)
    found: Any = [(SimpleNamespace(inputs=list), SimpleNamespace(watched=None, observed=observed(4)))] * 8
    counts = []
    for each in (0.1, 1.0, 100.0):
        monkeypatch.setattr("fl_privacy.auditing.scenarios.seconds_of_evaluation", lambda observed, each=each: each)
        for seconds, uploaded in ((0.0, True), (300.0, True), (300.0, False)):
            ladder = Scenarios(clients=(), attack="usual", seconds=seconds)  # type: ignore[arg-type]
            counts.append(len(ladder._in_time(found, uploaded=uploaded)))
    assert counts == [8, 8, 8, 1, 4, 1, 1, 1, 1]


def test_steps_of_adam_take_longer() -> None:
    assert seconds_of_evaluation(observed(99, "adam")) > seconds_of_evaluation(observed(99))


def test_few_examples_are_repeated_in_each_epoch_if_batch_norm_takes_no_single_one() -> None:
    def ask(only: OnlyExamples | None) -> Any:
        assert only is not None and only.number is not None
        return "a reply" if only.number > 2 and only.repeats else Failure("more than 1 value per channel is expected")

    assert _on_one(ask, 2) == "a reply"


def test_two_examples_are_attacked_if_the_attack_s_batch_norm_takes_no_single_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def singles(ladder: Scenarios, *, later: bool, fewest: int = 1, evaluation: bool = False) -> Any:
        return [(None, SimpleNamespace(watched=SimpleNamespace(program=None), number=fewest))], ""

    def singly(ladder: Scenarios, name: str, found: Any, reason: str) -> Answer:
        refused = "it failed (ValueError: Expected more than 1 value per channel when training)"
        return Answer(scenario=Scenario(name=name), reason=refused if found[0][1].number == 1 else "attacked")

    monkeypatch.setattr(Scenarios, "_singles", singles)
    monkeypatch.setattr(Scenarios, "_singly", singly)
    client: Any = SimpleNamespace(watched=SimpleNamespace(training=False), ask_later=None)
    made = {each.scenario.name: each.reason for each in Scenarios(clients=[client], attack=len).attack_all()}  # type: ignore[arg-type]
    assert made["gradient"] == made["one"] == "attacked"
