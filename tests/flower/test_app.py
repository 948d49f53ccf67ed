"""The Flower app: what is bundled, and a run through both apps without Flower's processes."""

import io
import json
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.app import UserConfig as RunConfig
from flwr.cli.build import build_fab_from_disk

from fl_privacy.cli.flower_app import client_app, server_app
from fl_privacy.config import compose_run
from fl_privacy.errors import UserError
from fl_privacy.experiment.protocols import Monitor, plain_loop
from fl_privacy.experiment.run import run_experiment
from fl_privacy.flower import LocalGrid

ROOT = Path(__file__).parents[2]
MEGABYTE = 1 << 20
SMALL = (
    "model=lenet federation=fedsgd federation.clients=2 federation.rounds=2 federation.plan.batch_size=8"
    " defense=dp_noise attack=none intercept.save=true intercept.uploads=update"
)


@pytest.fixture(autouse=True)
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_PRIVACY_STATE", str(tmp_path / "state"))


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_PRIVACY_SIMULATION", "1")


@pytest.mark.usefixtures("simulation")
def test_a_node_builds_only_what_is_registered_or_its_own_environment_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = f"{SMALL} model=custom model._target_=tests.experiment.strangers.Net"

    with pytest.raises(UserError, match="all 2 clients failed"):
        run_app(overrides, nodes=2)
    monkeypatch.setenv("FL_PRIVACY_TRUST", "tests.experiment.strangers")
    run_app(overrides, nodes=2)


def run_app(overrides: str, nodes: int, **settings: float | bool) -> None:
    config = RunConfig({"overrides": overrides, "round-timeout": 600, "authenticated-nodes": False, **settings})
    grid = LocalGrid(range(nodes), client_app)
    for context in grid.contexts.values():
        context.run_config = config
    server_app(grid, Context(run_id=1, node_id=1, node_config=RunConfig(), state=RecordDict(), run_config=config))


def test_the_bundle_holds_all_of_the_package_and_its_configuration() -> None:
    bundle = build_fab_from_disk(ROOT)

    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        held = set(archive.namelist())
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in ("fl_privacy", "conf")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "py.typed"
    }
    assert wanted <= held
    assert not any(name.startswith("tests/") for name in held)
    assert len(bundle) < 2 * MEGABYTE


@pytest.mark.usefixtures("simulation")
def test_the_apps_run_an_experiment_as_the_plain_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    run_app(f"{SMALL} out=by_flower", nodes=2)
    run_experiment(compose_run([*shlex.split(SMALL), "out=by_loop"]), plain_loop, Monitor())

    (loop,) = (tmp_path / "by_loop").glob("*dp_noise*")
    (flower,) = (tmp_path / "by_flower").glob("*dp_noise*")
    assert (loop / "model.safetensors").read_bytes() == (flower / "model.safetensors").read_bytes()
    assert captured(loop) == captured(flower)
    assert len(captured(loop)) == 2 * 2
    assert str(flower) in capsys.readouterr().out
    assert (flower / "report.html").stat().st_size > 1000


PROBED = SMALL.replace("intercept.uploads=update", "intercept.uploads=probe victims=2") + " baseline=false"


def threat_model(out: Path) -> str:
    (run,) = out.glob("*dp_noise*")
    return (run / "threat_model.json").read_text()


def test_deployed_clients_draw_from_their_own_secrets_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    run_app(f"{PROBED} out=deployed", nodes=2)
    run_experiment(compose_run([*shlex.split(PROBED), "out=simulated"]), plain_loop, Monitor())

    assert "Clients are deployed" in threat_model(tmp_path / "deployed/deployed")
    assert "This is a simulation" in threat_model(tmp_path / "simulated")
    assert (tmp_path / "state" / "node-secret").exists()
    weights = [
        next((tmp_path / out).glob("*dp_noise*/model.safetensors")) for out in ("deployed/deployed", "simulated")
    ]
    assert weights[0].read_bytes() != weights[1].read_bytes()


@pytest.mark.parametrize("uploads", ["update", "probe"])
def test_attacks_that_nobody_could_judge_are_refused(
    uploads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = SMALL if uploads == "update" else PROBED.replace("dp_noise", "instahide")

    with pytest.raises(UserError, match=r"deployed clients choose and transform .* FL_PRIVACY_SIMULATION=1"):
        run_app(overrides, nodes=2)

    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("server_says", ["0", "1"])
def test_server_and_nodes_agree_on_what_is_simulated(
    server_says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fl_privacy.cli.flower_app.is_simulation", lambda: server_says == "1")
    monkeypatch.setenv("FL_PRIVACY_SIMULATION", "0" if server_says == "1" else "1")

    with pytest.raises(UserError, match="set FL_PRIVACY_SIMULATION alike"):
        run_app(PROBED, nodes=2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(UserError, match="round-timeout is expected to be seconds above 0"):
        run_app(PROBED, nodes=2, **{"round-timeout": timeout})


def captured(run: Path) -> dict[str, Any]:
    return {
        path.name + path.parent.name + path.parent.parent.name: json.loads(path.read_text())
        for path in run.rglob("client-*.json")
    }


@pytest.mark.usefixtures("simulation")
def test_supernodes_that_do_not_fit_the_clients_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=r"set federation.clients=3, or start 2 SuperNodes"):
        run_app(f"{SMALL} baseline=false", nodes=3)


def test_wrong_overrides_are_an_error() -> None:
    with pytest.raises(UserError, match="defense has no option 'dp_nose'"):
        run_app("defense=dp_nose", nodes=2)


def test_secure_aggregation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match="The Flower app reads every update"):
        run_app("federation.clients=2 attack=none secure_aggregation=secagg out=secured", nodes=2)

    assert not (tmp_path / "secured").exists()
