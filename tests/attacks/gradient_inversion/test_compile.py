import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fl_privacy.attacks import GradientInversion, idlg, inverting_gradients
from fl_privacy.attacks.gradient_inversion import execution as compiling
from fl_privacy.attacks.gradient_inversion.execution import CompiledEvaluation, RecordedEvaluation, compiling_pays
from fl_privacy.attacks.gradient_inversion.grouping import group_victims, victims_of
from fl_privacy.attacks.gradient_inversion.preparation import prepare
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.errors import UserError
from fl_privacy.models import LeNet
from fl_privacy.types import Observation, Reconstruction
from tests.attacks.victims import CLASSES, SHAPE, examples, observations, smooth_net

ATTACK = inverting_gradients(iterations=8, sign="none", dtype="float64")
CPU = torch.device("cpu")


def as_traced(graph: nn.Module, **_: Any) -> nn.Module:
    return graph


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run traced code as it is, which takes no minute to compile."""
    monkeypatch.setattr(torch, "compile", as_traced)


def assert_same(found: list[Reconstruction], expected: list[Reconstruction]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.batch is not None and other.batch is not None
        torch.testing.assert_close(one.batch.inputs, other.batch.inputs, rtol=0, atol=1e-6)


def both(attack: GradientInversion, victims: list[Observation]) -> tuple[list[Reconstruction], list[Reconstruction]]:
    return tuple(replace(attack, compile=how)(victims, seed=0) for how in ("on", "off"))  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_attacks_end_where_others_do() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(128, 6), nn.Sigmoid(), nn.Linear(6, CLASSES)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same(*both(ATTACK, observations(net, 3)))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("attack", [ATTACK, idlg(iterations=2, enough=1e-2, dtype="float64")])
def test_one_program_serves_all_chunks_of_its_shape(attack: GradientInversion, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[object] = []
    make = compiling._compiled

    def counting(*arguments: Any) -> Callable[..., Any]:
        programs.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(compiling, "_compiled", counting)
    assert_same(*both(replace(attack, most_victims=2), observations(smooth_net(), 5)))
    assert len(programs) == 1


@pytest.mark.usefixtures("traced")
def test_what_a_compiler_takes_apart_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graphs.append(graph) or graph)
    net = LeNet(in_channels=2, image_size=8, num_classes=CLASSES).double()
    inverting_gradients(iterations=1, restarts=1, compile="on")(observations(net, 2), seed=0)
    used = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert any("convolution" in name for name in used) and not any("col2im" in name for name in used)


def test_a_program_that_gives_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **_: lambda *inputs: [2 * v for v in graph(*inputs)])
    with pytest.warns(UserWarning, match="changes numbers"):
        assert_same(*both(ATTACK, observations(smooth_net(), 2)))


def failing(*_: Any, **__: Any) -> None:
    raise RuntimeError("no header\nand much more")


def test_what_does_not_compile_is_an_error_only_if_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing)
    victims = observations(smooth_net(), 2)
    with pytest.raises(UserError, match=r"got: no header; use attack\.compile=off"):
        replace(ATTACK, compile="on")(victims, seed=0)
    monkeypatch.setattr("fl_privacy.attacks.gradient_inversion.execution.compiling_pays", lambda *_, **__: True)
    with pytest.warns(UserWarning, match="no header"):
        assert_same(ATTACK(victims, seed=0), replace(ATTACK, compile="off")(victims, seed=0))


def test_without_a_compiler_it_is_off_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not compiling_pays(CPU, runs=10**9, written=1e30, tensors=1)
    with pytest.raises(UserError, match="install g"):
        inverting_gradients(compile="on")
    with pytest.raises(UserError, match="compile is expected"):
        inverting_gradients(compile="yes")  # type: ignore[arg-type]


def test_large_work_pays_and_small_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.attacks.gradient_inversion.execution.compiler", lambda: "g++")
    group = group_victims(victims_of(list(enumerate(observations(smooth_net(), 2)))))[0]
    assert prepare(ATTACK, group, 0).evaluate is Problem.evaluate
    long = inverting_gradients(iterations=10**9)
    assert isinstance(prepare(long, group, 0).evaluate, CompiledEvaluation)
    assert isinstance(prepare(replace(long, compile="off"), group, 0).evaluate, RecordedEvaluation)
    assert isinstance(prepare(idlg(iterations=10**7), group, 0).evaluate, RecordedEvaluation)
    assert compiling_pays(torch.device("cuda"), runs=20_000, written=1, tensors=1)
    assert not compiling_pays(torch.device("cuda"), runs=4_800, written=1e15, tensors=1)


def near_the_truth(dtype: str) -> tuple[Problem, torch.Tensor]:
    """Prepare the cosine of victims at images that are nearly theirs."""
    attack = inverting_gradients(total_variation=0.0, dtype=dtype)  # type: ignore[arg-type]
    victims = observations(smooth_net(), 3, told=True)
    (group,) = group_victims(victims_of(list(enumerate(victims))))
    prepared = prepare(attack, group, 0)
    images = examples(3).inputs + 3e-3 * torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(2)).double()
    problem = prepared.problem(prepared.victims, [0] * 3)
    return problem, attack.space.to_variables(images).flatten(1).to(prepared.start(prepared.victims, [0] * 3)[0])


@pytest.mark.long
@pytest.mark.parametrize("how", ["eager", "traced", pytest.param("compiled", marks=pytest.mark.fuzz)])
def test_the_cosine_near_zero_is_that_of_float64(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "compiled" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    if how == "traced":
        monkeypatch.setattr(torch, "compile", as_traced)
    evaluate = Problem.evaluate if how == "eager" else CompiledEvaluation(demanded=True)
    expected = Problem.evaluate(*near_the_truth("float64"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = evaluate(*near_the_truth("float32"))
    assert expected[0].max() < 1e-4
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours.double() - reference).norm() / reference.norm()) < 1e-3
