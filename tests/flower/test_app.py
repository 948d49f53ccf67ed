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
from fl_privacy.config import compose
from fl_privacy.errors import UserError
from fl_privacy.flower import LocalGrid
from fl_privacy.pipeline.backend import plain_loop
from fl_privacy.pipeline.monitor import Monitor
from fl_privacy.pipeline.run import run_experiment

ROOT = Path(__file__).parents[2]
MEGABYTE = 1 << 20
SMALL = (
    "model=lenet federation=fedsgd federation.clients=2 federation.rounds=2 federation.plan.batch_size=8"
    " defense=dp_noise attack=none intercept.save=true intercept.target=update"
)


def test_a_node_builds_only_what_is_registered_or_its_own_environment_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = f"{SMALL} model=custom model._target_=tests.pipeline.strangers.Net"

    with pytest.raises(UserError, match="all 2 clients failed"):
        run_app(overrides, nodes=2)
    monkeypatch.setenv("FL_PRIVACY_TRUST", "tests.pipeline.strangers")
    run_app(overrides, nodes=2)


def run_app(overrides: str, nodes: int) -> None:
    config = RunConfig({"overrides": overrides})
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


def test_the_apps_run_an_experiment_as_the_plain_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    run_app(f"{SMALL} out=by_flower", nodes=2)
    run_experiment(compose([*shlex.split(SMALL), "out=by_loop"]), plain_loop, Monitor())

    (loop,) = (tmp_path / "by_loop").glob("*dp_noise*")
    (flower,) = (tmp_path / "by_flower").glob("*dp_noise*")
    assert (loop / "model.safetensors").read_bytes() == (flower / "model.safetensors").read_bytes()
    assert captured(loop) == captured(flower)
    assert len(captured(loop)) == 2 * 2
    assert str(flower) in capsys.readouterr().out
    assert (flower / "report.html").stat().st_size > 1000


def captured(run: Path) -> dict[str, Any]:
    return {
        path.name + path.parent.name + path.parent.parent.name: json.loads(path.read_text())
        for path in run.rglob("client-*.json")
    }


def test_supernodes_that_do_not_fit_the_clients_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=r"set federation.clients=3, or start 2 SuperNodes"):
        run_app(f"{SMALL} twin=false", nodes=3)


def test_wrong_overrides_are_an_error() -> None:
    with pytest.raises(UserError, match="defense has no option 'dp_nose'"):
        run_app("defense=dp_nose", nodes=2)


def test_secure_aggregation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match="The Flower app reads every update"):
        run_app("federation.clients=2 attack=none secure_aggregation=secagg out=secured", nodes=2)

    assert not (tmp_path / "secured").exists()
