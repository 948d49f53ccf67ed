"""What is captured reads other victims from the same memory, and what can't be captured runs as it is."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fl_privacy.attacks import idlg, inverting_gradients
from fl_privacy.attacks.gradient_inversion.execution import CapturedEvaluation, Run
from fl_privacy.attacks.gradient_inversion.grouping import group_victims, victims_of
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, prepare
from fl_privacy.types import Observation, Reconstruction
from tests.attacks.victims import observations, smooth_net
from tests.selection import few

ATTACKS = [inverting_gradients(iterations=40), idlg(iterations=3, enough=0)]


def run_again(run: Run) -> tuple[Callable[[], object], tuple[Tensor, Tensor]]:
    """Do what a graph does: run the same operations on the same memory, and write to the same memory."""
    loss, gradient = run()

    def replay() -> None:
        for place, value in zip((loss, gradient), run(), strict=True):
            place.copy_(value)

    return replay, (loss, gradient)


def can_not(run: Run) -> tuple[Callable[[], object], tuple[Tensor, Tensor]]:
    raise RuntimeError("operation not permitted when stream is capturing")


def of_another(run: Run) -> tuple[Callable[[], object], tuple[Tensor, Tensor]]:
    """Capture something, but other numbers."""
    loss, gradient = run()
    return lambda: None, (loss + 1, gradient)


def prepared(attack, seen: list[Observation]) -> Prepared:
    return prepare(attack, group_victims(victims_of(list(enumerate(seen))))[0], 0)


@cache
def uncaptured(number: int) -> list[Reconstruction]:
    return list(replace(ATTACKS[number], most_victims=2, compile="off")(observations(smooth_net(), 5), seed=0))


@pytest.mark.parametrize("number", few([0, 1], 1))
@pytest.mark.parametrize("capture", [run_again, can_not, of_another])
def test_every_bit_is_that_of_the_evaluation(number, capture, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, made = uncaptured(number), []

    class Captured(CapturedEvaluation):
        def __init__(self) -> None:
            super().__init__(capture)
            made.append(self)

    monkeypatch.setattr(Prepared, "_uncompiled", property(lambda self: Captured()))
    found = uncaptured.__wrapped__(number)
    assert made
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one.batch.inputs, other.batch.inputs)
        assert one.loss == other.loss and one.history == other.history


def test_victims_that_left_and_other_victims_are_evaluated_as_themselves() -> None:
    few, all_of_them = (prepared(ATTACKS[0], observations(smooth_net(), n)) for n in (2, 4))
    evaluate, graphs = CapturedEvaluation(run_again), set()
    for of, rows in ((few, [0, 1]), (all_of_them, [2, 3]), (all_of_them, [0, 1, 2, 3]), (few, [1])):
        victims = [of.victims[row] for row in rows]
        problem, variables = of.problem(victims, [0] * len(rows)), of.start(victims, [0] * len(rows))[0]
        for _ in range(12):
            found, expected = evaluate(problem, variables), problem.evaluate(variables)
            variables = variables + 0.01
            assert all(map(torch.equal, found, expected))
        graphs.add(evaluate._program)
    assert None not in graphs and len(graphs) == 3


def test_short_attacks_and_many_victims_are_not_captured() -> None:
    assert CapturedEvaluation.pays(1, 4800)
    assert not CapturedEvaluation.pays(1, 20)
    assert not CapturedEvaluation.pays(4096, 4800)
