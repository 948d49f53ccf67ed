"""On a GPU the same comes out as on the CPU; ``make test-gpu``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_privacy.attacks import idlg, inverting_gradients
from fl_privacy.attacks.gradient_inversion import execution
from fl_privacy.attacks.gradient_inversion.execution import CapturedEvaluation
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.settings import Compile
from fl_privacy.federation import Audit, plain_rounds, run_all
from fl_privacy.federation.parallel import ShardedAttack
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.setup import build_setup
from fl_privacy.types import Tensors
from tests.attacks.victims import observations, smooth_net
from tests.experiment.runs import TINY, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")]


def read_on(device: str, *, compile: Compile = "off") -> list[torch.Tensor]:
    attack = inverting_gradients(iterations=20, sign="none", dtype="float64", device=device, compile=compile)
    found = attack(observations(smooth_net(), 5), seed=3)
    assert [one.failure for one in found] == [None] * 5
    return [one.batch.inputs for one in found if one.batch is not None]


@pytest.mark.parametrize("compile", ["off", "on"])
def test_an_attack_reads_the_same(compile: Compile) -> None:
    for here, there in zip(read_on("cpu"), read_on("cuda", compile=compile), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-6)


def test_a_captured_evaluation_reads_the_same_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose last chunk is smaller, and whose second one is other victims in the first one's memory."""
    captured = []

    class Counting(CapturedEvaluation):
        def __call__(self, problem: Problem, variables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = super().__call__(problem, variables)
            captured.append(self._graph is not None)
            return found

    monkeypatch.setattr(execution, "CapturedEvaluation", Counting)
    victims = observations(smooth_net(), 5)
    attack = inverting_gradients(iterations=90, sign="none", dtype="float64", most_victims=2, compile="off")
    here, there = (replace(attack, device=device)(victims, seed=3) for device in ("cpu", "cuda"))
    assert sum(captured) > 150
    for one, other in zip(here, there, strict=True):
        assert one.batch is not None and other.batch is not None
        torch.testing.assert_close(other.batch.inputs, one.batch.inputs, rtol=1e-5, atol=1e-5)


def test_second_order_moves_alike() -> None:
    victims = observations(smooth_net(), 3)
    here, there = (idlg(iterations=2, dtype="float64", device=device)(victims, seed=0) for device in ("cpu", "cuda"))
    for one, other in zip(here, there, strict=True):
        assert one.batch is not None and other.batch is not None
        torch.testing.assert_close(other.batch.inputs, one.batch.inputs, rtol=1e-4, atol=1e-4)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_parts_of_an_attack_find_the_gpu() -> None:
    attack, victims = idlg(iterations=3, dtype="float64", device="cuda"), observations(smooth_net(), 4)
    sharded = ShardedAttack(attack=attack, shards=2, threads=1, device=torch.device("cuda"))
    for one, other in zip(sharded(victims, seed=3), attack(victims, seed=3), strict=True):
        assert one.batch is not None and other.batch is not None
        torch.testing.assert_close(one.batch.inputs, other.batch.inputs)


def trained_on(device: str) -> Tensors:
    settings = ["federation.clients=3", "federation.rounds=3", "attack=none", "federation.plan.batch_size=8"]
    federation = build_setup(compose_run([*settings, f"device={device}", "model=resnet20", "defense=dp_noise"]))
    nobody: Any = None
    run_all(plain_rounds(federation.server, federation.clients, rounds=3, audit=Audit(), interceptor=nobody))
    return federation.server.state.parameters


def test_a_training_ends_with_the_same_weights() -> None:
    here, there = trained_on("cpu"), trained_on("cuda")
    assert all(t.device.type == "cpu" for t in there.values()), "uploads leave the GPU"
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=1e-2, atol=1e-3)


def test_a_run_names_its_gpu(tmp_path: Path) -> None:
    done = run("run", *TINY, "device=cuda", "attack=inverting_gradients", out=tmp_path)
    assert done.status == 0
    assert done.json("environment.json")["gpus"]
    assert len(done.records("image")) == 4
