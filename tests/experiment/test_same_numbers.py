"""Whatever carries the messages, a run with the same seed leaves the same bytes."""

from pathlib import Path

import pytest

from tests.experiment.runs import TINY, Run, run

SETTINGS = {
    "probes of defended clients": ("defense=dp_noise", "baseline=false"),
    "updates of FedAvg": ("federation=fedavg", "federation.plan.steps=2", "federation.plan.epochs=null",
                          "federation.plan.batch_size=2", "intercept.uploads=update"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Each case in the plain loop."""
    return {case: run("run", *TINY, *SETTINGS[case], out=tmp_path_factory.mktemp("loop")) for case in SETTINGS}


@pytest.mark.long
@pytest.mark.parametrize("case", SETTINGS)
def test_flower_in_one_process(case: str, plain: dict[str, Run], tmp_path: Path) -> None:
    assert_same_run(plain[case], run("run", *TINY, *SETTINGS[case], "backend=flower", out=tmp_path))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_ray(plain: dict[str, Run], tmp_path: Path) -> None:
    case = "probes of defended clients"
    settings = (*TINY, *SETTINGS[case], "backend=ray", "backend.num_cpus=0.5", "backend.actors=2")
    assert_same_run(plain[case], run("run", *settings, out=tmp_path))


def assert_same_run(expected: Run, other: Run) -> None:
    assert expected.status == other.status == 0
    assert (expected.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()
    assert expected.path.name == other.path.name
    assert expected.records("image")
    for kind in ("round", "victim", "history"):
        assert expected.records(kind) == other.records(kind)
