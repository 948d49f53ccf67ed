"""Victims attacked in parts, in Ray tasks, fare as in one process."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from fl_privacy.attacks import GradientInversion, Progress, idlg, no_progress
from fl_privacy.errors import UserError
from fl_privacy.federation.parallel import ShardedAttack, expect_answer, ray_cluster
from fl_privacy.runs.build import build_attack
from fl_privacy.runs.config import compose_run
from fl_privacy.types import Observation, Reconstruction
from tests.attacks.victims import observations, smooth_net
from tests.experiment.runs import TINY, run


def halved(attack: Callable[..., list[Reconstruction]]) -> ShardedAttack:
    return ShardedAttack(attack=attack, shards=2, threads=1, device=torch.device("cpu"))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_shards_give_the_same_bits() -> None:
    attack = idlg(iterations=3, dtype="float64")
    victims, seen = observations(smooth_net(), 5), list[float]()
    expected = attack(victims, seed=3)
    found = halved(attack)(victims, seed=3, progress=lambda done, total: seen.append(done / total))
    for one, other in zip(found, expected, strict=True):
        assert one.id == other.id
        assert one.batch is not None and other.batch is not None
        assert torch.equal(one.batch.inputs, other.batch.inputs)
        assert torch.equal(one.batch.labels, other.batch.labels)
    assert seen == sorted(seen) and seen[-1] == 1


def dying(observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress) -> list[Reconstruction]:
    if observations[0].id.probe == 0:
        os._exit(1)
    return [Reconstruction(id=o.id, batch=None, loss=1.0) for o in observations]


def raising(
    observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
) -> list[Reconstruction]:
    raise ValueError("no such layer\nand more")


def refusing(
    observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
) -> list[Reconstruction]:
    raise UserError("attack.size is expected to be even.")


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_victims_of_a_task_that_dies_are_failures_and_the_others_go_on() -> None:
    found = halved(dying)(observations(smooth_net(), 4), seed=0)
    assert [r.failure is None for r in found] == [False, False, True, True]
    assert "task" in str(found[0].failure) and "\n" not in str(found[0].failure)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_what_a_task_raises_is_told_in_a_line() -> None:
    victims = observations(smooth_net(), 2)
    assert str(halved(raising)(victims, seed=0)[0].failure).endswith("ValueError: no such layer")
    with pytest.raises(UserError, match=r"attack\.size is expected to be even"):
        halved(refusing)(victims, seed=0)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_an_attack_with_shards_leaves_the_same_results(tmp_path: Path) -> None:
    settings = ("attack", "model=lenet_dlg", "attack=idlg", "attack.dtype=float64", *TINY[3:])
    whole, parts = (run(*settings, f"attack.shards={n}", out=tmp_path / str(n)) for n in (1, 2))
    assert whole.path.name == parts.path.name
    for one, other in zip(whole.records("image"), parts.records("image"), strict=True):
        assert one["id"] == other["id"] and one["psnr"] == pytest.approx(other["psnr"], rel=1e-6)


def test_one_part_needs_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = idlg(iterations=1, dtype="float64")
    monkeypatch.setattr("fl_privacy.federation.parallel.ray_cluster", None)
    assert len(halved(attack)(observations(smooth_net(), 1), seed=0)) == 1
    assert halved(attack)([], seed=0) == []


def test_without_ray_shards_are_refused_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.checks.packages.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"attack\.shards=2 .*flwr\[simulation\]"):
        build_attack(compose_run(["attack=idlg", "attack.shards=2"]).attack)


@pytest.mark.parametrize("shards", ["0", "1.5", "two"])
def test_wrong_numbers_of_shards_are_refused(shards: str) -> None:
    with pytest.raises(UserError, match=r"attack\.shards is expected to be a whole number"):
        build_attack(compose_run(["attack=idlg", f"attack.shards={shards}"]).attack)


def test_every_attack_can_be_sharded() -> None:
    overrides = ["attack=custom", "attack._target_=fl_privacy.attacks.idlg", "attack.shards=3"]
    built = build_attack(compose_run(overrides).attack, device="cpu")
    assert isinstance(built, ShardedAttack) and built.shards == 3
    assert isinstance(build_attack(compose_run(["attack=idlg"]).attack), GradientInversion)


def test_something_else_at_the_address_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.federation.parallel.PATIENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(UserError, match="no Ray"):
            expect_answer()
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("address", ["", "127.0.0.1:9"])
def test_a_cluster_that_does_not_start_in_time_is_a_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def late(**settings: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because")  # as Ray's own

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr("fl_privacy.federation.parallel.expect_answer", lambda: None)
    with pytest.raises(UserError, match=r"timed out during startup\b.*; ") as error, ray_cluster():
        pytest.fail("it has not started")
    assert "\n" not in str(error.value) and ("RAY_ADDRESS" in str(error.value)) == bool(address)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_that_runs_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    expect_answer()


@pytest.mark.parametrize(
    ("address", "hint"), [("127.0.0.1:9", "127.0.0.1:9"), ("nowhere", "no address"), ("ray://127.0.0.1:9", "refused")]
)
def test_a_cluster_that_does_not_answer_is_told_within_seconds(
    address: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    started = time.monotonic()
    with pytest.raises(UserError, match=hint):
        expect_answer()
    assert time.monotonic() - started < 20
