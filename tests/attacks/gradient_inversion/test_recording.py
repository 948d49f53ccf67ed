"""What is run from a recording is the same to the last bit, and what can't be recorded is run as it is."""

import pytest
import torch

from fl_privacy.attacks import idlg, inverting_gradients
from fl_privacy.attacks.gradient_inversion import execution
from fl_privacy.attacks.gradient_inversion.execution import RecordedEvaluation
from fl_privacy.attacks.gradient_inversion.problem import Problem
from tests.attacks.victims import observations, smooth_net
from tests.selection import few


@pytest.mark.parametrize("attack", [inverting_gradients(iterations=40), idlg(iterations=2, enough=0)])
@pytest.mark.parametrize("victims", few([1, 2], 1))
def test_every_bit_is_that_of_the_evaluation(attack, victims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observations(smooth_net(), victims)
    plain = attack(seen, seed=0)
    recorded = []

    class Counting(RecordedEvaluation):
        def __call__(self, problem: Problem, variables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = super().__call__(problem, variables)
            recorded.append(self._program is not None)
            return found

    monkeypatch.setattr(RecordedEvaluation, "pays", lambda victims, evaluations: True)
    monkeypatch.setattr(execution, "RecordedEvaluation", Counting)
    found = attack(seen, seed=0)
    assert any(recorded)
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one.batch.inputs, other.batch.inputs)
        assert one.loss == other.loss and one.history == other.history


def test_short_attacks_and_many_victims_are_not_recorded() -> None:
    assert RecordedEvaluation.pays(1, 4800)
    assert not RecordedEvaluation.pays(1, 100)
    assert not RecordedEvaluation.pays(64, 4800)


def test_a_recording_of_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedEvaluation, "pays", lambda victims, evaluations: True)
    attack, seen = inverting_gradients(iterations=30, noise=0.0), observations(smooth_net(), 1)
    expected = attack(seen, seed=0)
    monkeypatch.setattr(RecordedEvaluation, "made_at", 3)
    monkeypatch.setattr(
        "fl_privacy.attacks.gradient_inversion.execution.operations",
        lambda problem, variables, tensors: torch.fx.symbolic_trace(_wrong),
    )
    found = attack(seen, seed=0)
    assert torch.equal(found[0].batch.inputs, expected[0].batch.inputs)


def _wrong(variables: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return variables.sum(1), variables * 2
