"""What depends on the device, reached without a GPU: by its name, by shapes alone, by tensors that only say so."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_privacy.attacks import idlg
from fl_privacy.attacks.gradient_inversion import execution as compiling, execution as memory
from fl_privacy.attacks.gradient_inversion.execution import CapturedEvaluation, CompiledEvaluation, compiling_pays
from fl_privacy.attacks.gradient_inversion.grouping import group_victims, victims_of
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, prepare
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.defenses.policy_search.scores import GradientSimilarity
from fl_privacy.errors import UserError
from fl_privacy.federation.parallel import ShardedAttack
from fl_privacy.flower.ray_nodes import check_request
from fl_privacy.models.gradients.convolution import convolution_gradients
from fl_privacy.models.gradients.memory import resolve_device, spare_bytes
from fl_privacy.rng import derive_generator, seeded_globally
from fl_privacy.runs.folder.identity import describe_environment
from fl_privacy.types import ModelState
from tests.attacks.victims import SHAPE, observations, smooth_net

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


class SaysGpu(Tensor):
    """Values on the CPU that say they are on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def says_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(SaysGpu)


@pytest.fixture
def gpu_of_80_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which 20 GiB are free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 80 * GIB))


@pytest.mark.usefixtures("gpu_of_80_gib")
def test_memory_is_the_gpus() -> None:
    assert spare_bytes(GPU) == int(0.4 * 20 * GIB)
    assert memory._bytes_of_a_chunk(GPU) == int(0.35 * 80 * GIB)
    assert memory._bytes_of_a_chunk(CPU) == 4 * GIB


@pytest.mark.usefixtures("gpu_of_80_gib")
@pytest.mark.parametrize(("needed", "at_once"), [(1, 4096), (GIB // 100, 800), (100 * GIB, 1)])
def test_more_victims_go_onto_a_gpu_together(needed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "written_bytes", lambda problem, variables: needed)
    problem: Any = SimpleNamespace(rounds=[SimpleNamespace(targets={})])
    optimizer: Any = SimpleNamespace(moments=0)
    assert memory.victims_at_once(problem, says_gpu(torch.zeros(1, 4)), optimizer, victims=999) == at_once
    assert memory.victims_at_once(problem, torch.zeros(1, 4), optimizer, victims=999) <= 128


@pytest.mark.parametrize("settings", [{}, {"padding": 1, "stride": 2}, {"groups": 2, "padding": "same"}])
def test_convolutions_have_the_same_gradients_there(settings: dict[str, Any]) -> None:
    module = nn.Conv2d(4, 6, 3, **settings).double()
    inputs = torch.rand(2, 3, 4, 8, 8, dtype=torch.float64)
    deltas = torch.rand_like(module(inputs.flatten(0, 1))).unflatten(0, (2, 3))
    here = convolution_gradients(module, inputs, deltas, with_bias=True)
    there = convolution_gradients(module, says_gpu(inputs), says_gpu(deltas), with_bias=True)
    shapes = convolution_gradients(module.to("meta"), inputs.to("meta"), deltas.to("meta"), with_bias=True)
    for own, other, shape in zip(here, there, shapes, strict=True):
        assert own is not None and other is not None and shape is not None
        torch.testing.assert_close(own, other.as_subclass(Tensor))
        assert shape.shape == own.shape


def test_programs_are_compiled_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made = list[Any](), list[tuple[Tensor, Tensor]]()

    def compiled(graph: Any, *, mode: Any, **settings: Any) -> Any:
        asked.append(mode)
        return graph

    def graph(variables: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        made.append((variables.square().sum(1), 2 * variables))
        return made[-1]

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(compiling, "operations", lambda problem, variables, tensors: graph)
    monkeypatch.setattr(compiling, "tensors_of", lambda problem: [])
    problem: Any = SimpleNamespace(evaluate=graph)
    for variables, mode, warm_up in [(torch.rand(2, 3), None, 1), (says_gpu(torch.rand(2, 3)), "reduce-overhead", 3)]:
        made.clear()
        evaluate = CompiledEvaluation(demanded=True)
        loss, _ = evaluate(problem, variables)
        assert asked[-1] == mode
        assert len(made) == warm_up + 1 + 1, "warm-up, comparison, and the one that was asked for"
        assert (loss is made[-1][0]) == (mode is None), "a graph on a GPU writes to the same memory again"
    assert compiling_pays(GPU, runs=10_001, written=0, tensors=10**6) == (compiling.compiler() is not None)
    assert not compiling_pays(GPU, runs=10_000, written=1e30, tensors=1)


def test_a_gpus_evaluations_are_captured_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = group_victims(victims_of(list(enumerate(observations(smooth_net(), 2)))))
    prepared = prepare(idlg(iterations=10**6, compile="off"), group, 0)
    assert prepared.evaluate is not Problem.evaluate
    monkeypatch.setattr(Prepared, "_like", torch.empty(0, device="meta"))
    assert isinstance(prepared._uncompiled, CapturedEvaluation)
    monkeypatch.setattr(Prepared, "capacity", 4096)
    (many,) = group_victims(victims_of(list(enumerate(observations(smooth_net(), 2) * 50))))
    assert prepare(idlg(iterations=10**6, compile="off"), many, 0)._uncompiled is Problem.evaluate


def test_streams_of_a_gpu_are_seeded_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, forked, current = list[tuple[torch.device, int]](), list[Any](), list[torch.device]()

    @contextmanager
    def fork(devices: Any) -> Iterator[None]:
        forked.append(devices)
        yield

    @contextmanager
    def within(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeds.append((current[-1], seed)))
    state = torch.get_rng_state()
    try:
        with seeded_globally(derive_generator(5, "a"), GPU):
            drawn = torch.rand(3)
        with seeded_globally(derive_generator(5, "a"), CPU):
            assert torch.equal(torch.rand(3), drawn)
    finally:
        torch.set_rng_state(state)
    assert forked == [[GPU], []]
    assert seeds == [(GPU, derive_generator(5, "a").initial_seed())]


@pytest.mark.parametrize(("gpus", "tasks", "share"), [(2, 5, 1 / 3), (8, 8, 1.0), (4, 1, 1.0)])
def test_parts_of_an_attack_share_the_gpus(
    gpus: int, tasks: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": gpus})
    attack = ShardedAttack(attack=idlg(), shards=tasks, threads=1, device=GPU)
    assert attack._share(tasks) == {"num_cpus": 0, "num_gpus": share}
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 4})
    with pytest.raises(UserError, match="free GPU"):
        attack._share(tasks)


@pytest.mark.usefixtures("gpu_of_80_gib")
def test_a_gpu_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("auto").type == "cuda" and resolve_device("cuda:1") == torch.device("cuda", 1)
    assert describe_environment(seed=0)["gpus"] == ["GPU 0", "GPU 1"]
    check_request(1, 0.5, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == CPU
    with pytest.raises(UserError, match="sees none"):
        resolve_device("cuda")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"0\.5 GPUs"):
        check_request(1, 0.5, None)


def test_compared_images_are_cut_by_a_cpus_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(128, 5))
    similarity = GradientSimilarity(net, ModelState.of(net), SHAPE)
    monkeypatch.setattr("fl_privacy.defenses.policy_search.scores.spare_bytes", lambda device: 10**12)
    monkeypatch.setattr("fl_privacy.defenses.policy_search.scores.written_by", lambda compute: 1)
    images, labels = torch.rand(1, 2, *SHAPE), torch.zeros(1, dtype=torch.int64)
    on_cpu = similarity._most(images, labels)
    similarity.device = GPU
    assert similarity._most(images, labels) == 10**12 > on_cpu


def test_the_roofline_counts_on_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "experiments"))
    roofline = importlib.import_module("roofline")
    inputs, classes = 3 * 4 * 4, 10
    flops, moved = roofline.count(lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes, bias=False)), 4)
    assert flops == 5 * 2 * inputs * classes, "outputs, weight gradient, and the three products of its derivative"
    assert moved >= 4 * 5 * inputs * classes
    a_hundredth = roofline.Machine("", gflops=1.0, gb_s=100.0, source="")
    assert roofline.bound(1e9, 1e9, a_hundredth) == (1.0, "operations")
    assert roofline.bound(1e9, 1e12, a_hundredth) == (10.0, "bytes")
