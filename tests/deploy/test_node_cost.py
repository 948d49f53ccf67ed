"""The cost of a client's round on a small device, measured and shown."""

import json
import os
import sys
from pathlib import Path

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose_run, to_yaml
from fl_privacy.runs.config.untrusted import registered_run
from fl_privacy.runs.folder import read_run
from fl_privacy.site.deploy.device import MIB, joules_so_far, run_limited
from tests.results.runs import record

ALLOCATE = (
    "import sys; block = bytearray(int(sys.argv[1]) << 20); import time; time.sleep(0.3); print(len(block) >> 20)"
)


def limited(mib: int, memory: int, core: int = 0):
    command = [sys.executable, "-c", ALLOCATE, str(mib)]
    return run_limited(command, memory=memory * MIB, core=core, environment=os.environ)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nobody may make a cgroup."""
    monkeypatch.setattr("fl_privacy.site.deploy.device._CGROUP", tmp_path)


@pytest.mark.parametrize("by", ["cgroup", "parent"])
def test_a_command_gets_so_much_memory_and_no_more(by: str, request: pytest.FixtureRequest) -> None:
    if by == "parent":
        request.getfixturevalue("watched")

    enough, little = limited(64, 256), limited(512, 128)

    assert (enough.status, enough.out.strip(), enough.too_large) == (0, "64", False)
    assert 64 * MIB < enough.peak < 128 * MIB
    assert little.too_large and little.status < 0
    if by == "parent":
        assert enough.held_by == "its parent"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_it_has_one_core() -> None:
    core = max(os.sched_getaffinity(0))
    told = run_limited(
        [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
        memory=256 * MIB,
        core=core,
        environment=os.environ,
    )
    assert told.out.strip() == str({core})


def test_energy_is_that_of_the_packages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.site.deploy.device._POWER", tmp_path)
    assert joules_so_far() is None
    for number, (name, microjoules) in enumerate(
        [("package-0", 2_000_000), ("package-1", 500_000), ("psys", 9_000_000)]
    ):
        (zone := tmp_path / f"intel-rapl:{number}").mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text(f"{microjoules}\n")
    assert joules_so_far() == 2.5


@pytest.mark.long
def test_what_a_round_costs_stands_on_the_run_s_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["federation.rounds=1", "federation.clients=2", "attack=none", "baseline=false"]
    small += ["defense=dp_noise", f"out={tmp_path}"]
    assert run_command_line(["run", *small]) == 0
    (run,) = [path.parent for path in tmp_path.glob("*/run.json")]

    assert run_command_line(["node-cost", str(tmp_path), "--repeats", "2"]) == 0
    assert "CPU s a round" in capsys.readouterr().out

    upload = read_run(run).summary.upload
    assert upload["node_fits"].mean == 1
    assert 0 < upload["node_cpu_seconds"].mean < 60
    assert 100 * MIB < upload["node_peak_bytes"].mean < 1024 * MIB
    assert run_command_line(["report", str(run)]) == 0
    assert "On a node" in (run / "report.html").read_text()

    assert run_command_line(["node-cost", str(run), "--memory", "128"]) == 0  # PyTorch alone has more
    assert "does not fit into 128 MiB" in capsys.readouterr().out
    assert read_run(run).summary.upload["node_fits"].mean == 0
    assert "node_cpu_seconds" not in read_run(run).summary.upload


def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    identity = {"format": 1, "label": "x", "hash": "", "training": "", "repeat": "", "undefended": False, "config": {}}
    (unfinished / "run.json").write_text(json.dumps(identity))
    interrupted = record(tmp_path / "sweep", changes={"command": "run"}, finish=False)
    cases = {
        ("node-cost", str(tmp_path / "nothing")): "expected to hold runs that trained",
        ("node-cost", str(interrupted)): "has no summary.json",
        ("node-cost", str(interrupted.parent)): "expected to hold runs that trained",
        ("node-cost", str(unfinished)): "expected to be a run of `fl-privacy run`, but is another",
        ("node-cost", str(unfinished), "--repeats", "0"): "--repeats is expected to be at least 1",
        ("node-cost", str(unfinished), "--memory", "3"): "--memory is expected to be at least 128",
    }
    for arguments, message in cases.items():
        assert run_command_line(list(arguments)) != 0, arguments
        said = capsys.readouterr().err
        assert message in " ".join(said.split()), said
        assert "Traceback" not in said


def test_nothing_that_a_folder_names_is_imported(tmp_path: Path) -> None:
    defaults = to_yaml(compose_run(["model=mlp"]))
    path = tmp_path / "config.yaml"
    path.write_text(f"command: run\n{defaults}")
    assert registered_run(path)["choices"]["model"] == "mlp"
    for target in ("os.system", "fl_privacy.files.write_whole"):
        path.write_text(f"command: run\n{defaults}".replace("fl_privacy.models.MLP", target))
        with pytest.raises(UserError, match="trust"):
            registered_run(path)
        assert registered_run(path, [target])
    path.write_text(f"command: run\n{defaults}".replace("seed: 0", "seed: ${oc.env:HOME}"))
    with pytest.raises(UserError, match="refers to something else"):
        registered_run(path)
