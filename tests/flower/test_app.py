"""The Flower app: what is bundled, and a run through both apps without Flower's processes."""

import io
import json
import shlex
import shutil
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict, UserConfig as RunConfig
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.object_ref import validate
from PIL import Image

from fl_privacy.cli.flower_app import client_app, make_client, server_app
from fl_privacy.errors import UserError
from fl_privacy.federation import public_state
from fl_privacy.flower import LocalGrid
from fl_privacy.flower.grids import FIRST_NODE
from fl_privacy.flower.records import CONFIG, state_records
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.run import run_experiment
from fl_privacy.runs.run_location import Monitor, plain_loop
from fl_privacy.site.deploy import write_deployment

pytestmark = pytest.mark.usefixtures("undrawn_charts")

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
    grid = grid_of(overrides, nodes, **settings)
    config = next(iter(grid.contexts.values())).run_config
    server_app(grid, Context(run_id=1, node_id=1, node_config=RunConfig(), state=RecordDict(), run_config=config))


def grid_of(overrides: str, nodes: int, **settings: float | bool) -> LocalGrid:
    config = RunConfig({"overrides": overrides, "round-timeout": 600, "authenticated-nodes": False, **settings})
    grid = LocalGrid(range(nodes), client_app)
    for context in grid.contexts.values():
        context.run_config = config
    return grid


@pytest.mark.long
def test_the_bundles_are_thin_and_name_the_installed_apps(tmp_path: Path) -> None:
    write_deployment(tmp_path / "out", nodes=1, host="localhost", port=8000)
    told, copy = [], tmp_path / "copy"
    shutil.copytree(ROOT / "fl_privacy", copy / "fl_privacy", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    for app in (copy, tmp_path / "out" / "app"):
        bundle = build_fab_from_disk(app)
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            held = set(archive.namelist())
            config = tomllib.loads(archive.read("pyproject.toml").decode())
        assert held <= {"pyproject.toml", "LICENSE", "README.md", ".info/CONTENT"}
        assert len(bundle) < MEGABYTE // 10
        told.append(config["tool"]["flwr"]["app"])
        for reference in told[-1]["components"].values():
            assert validate(reference, project_dir=app)[0]
    assert told[0]["components"] == told[1]["components"]
    assert told[0]["config"] == {**told[1]["config"], "authenticated-nodes": False}


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
    seen_by = "in_simulation_engine" if server_says == "1" else "in_actor"
    monkeypatch.setattr(f"fl_privacy.cli.flower_app.{seen_by}", lambda *_: True)
    monkeypatch.setenv("FL_PRIVACY_SIMULATION", "0")

    with pytest.raises(UserError, match="set FL_PRIVACY_SIMULATION alike"):
        run_app(PROBED, nodes=2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(UserError, match="round-timeout in seconds is expected to be above 0 and finite"):
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


SECURED = "model=lenet federation.clients=3 federation.rounds=2 federation.plan.batch_size=8 attack=none"


def test_deployed_nodes_train_under_secure_aggregation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    run_app(f"{SECURED} secure_aggregation=secagg out=secured", nodes=3)

    (run,) = (path.parent for path in (tmp_path / "secured/deployed").glob("*/metrics.jsonl"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows if row["kind"] == "round"] == [[0, 1, 2]] * 2
    assert "SecAgg+ hides each update" in (run / "threat_model.json").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("secure_aggregation=ckks", "secure_aggregation=none or secagg, but got ckks"),
        ("secure_aggregation=secagg attack=idlg", "expected without attacks on single updates"),
        ("secure_aggregation=secagg defense=split_fed", "layers are private"),
    ],
)
def test_what_secure_aggregation_can_t_do_is_refused(
    overrides: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=message):
        run_app(f"{SECURED} {overrides} baseline=false out=secured", nodes=3)


def test_a_node_masks_its_update_whatever_the_server_asks(tmp_path: Path) -> None:
    """The run says SecAgg+: a plain training message gets no plain answer, a probe none at all."""
    grid = grid_of(f"{SECURED} secure_aggregation=secagg", nodes=3)
    wrapped = make_client(grid.contexts[FIRST_NODE]).wrapped
    records = state_records(public_state(wrapped.model, wrapped.defense))
    numbers = {"server-round": 1, "attempt": 1, "victim": 0, "batch-size": 1}
    content = RecordDict({**records, CONFIG: ConfigRecord(numbers)})

    for kind in ("train", "train.default", "train.probe", "train.other"):
        (reply,) = grid.send_and_receive([Message(content, FIRST_NODE, kind)])
        assert reply.has_error(), kind


OWN = (
    "model=lenet federation=fedavg federation.clients=2 federation.rounds=2 federation.plan.batch_size=8 attack=none"
    " baseline=false defense=spn data=image_folder data.image_size=16 data.channels=3 data.classes=[bird,cat,dog]"
)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Of two nodes and the server; the first node has no cats."""
    rng = np.random.default_rng(0)
    roots = [tmp_path / f"images-{number}" for number in range(3)]
    for root in roots:
        for name in ("bird", "dog") if root == roots[0] else ("bird", "cat", "dog"):
            (root / name).mkdir(parents=True)
            for index in range(10):
                Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(root / name / f"{index}.png")
    return roots


def run_on_folders(overrides: str, folders: list[Path], *, told: bool = True, **settings: bool) -> None:
    grid = grid_of(overrides, 2, **{"own-data": told, **settings})
    for number, context in enumerate(grid.contexts.values()):
        context.node_config = RunConfig({**context.node_config, "data-path": str(folders[number])})
    context = next(iter(grid.contexts.values()))
    server_app(grid, Context(1, 1, RunConfig(), RecordDict(), context.run_config))


def test_nodes_train_on_folders_of_their_own(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path / "cache"))

    run_on_folders(f"{OWN} data.root={folders[2]} out=own", folders)

    (run,) = (path.parent for path in (tmp_path / "own/deployed").glob("*/metrics.jsonl"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows if row["kind"] == "round"] == [[0, 1]] * 2
    assert "data of their own" in (run / "threat_model.json").read_text()
    assert not (run / "partition.json").exists(), "the server does not know it"
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1, "only the server's images are kept decoded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attack=idlg", "nothing is expected that needs the clients' data, but got attack=idlg"),
        ("defense=dp_sgd privacy.epsilon=8", "but got privacy.epsilon"),
        ("baseline=true", "but got baseline=true"),
        ("data.classes=null", "data.classes is expected for nodes"),
        ("data.classes=[bird,cat]", "one is dog; rename it or add it to data.classes"),
        (None, "expected to train on the data that the run names"),
    ],
)
def test_what_can_t_be_with_folders_of_their_own_is_refused(
    change: str | None, message: str, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=message):
        run_on_folders(f"{OWN} data.root={folders[2]} out=own {change or ''}", folders, told=change is not None)


def test_data_of_their_own_are_not_probed(folders: list[Path]) -> None:
    grid = grid_of(f"{OWN} data.root={folders[2]}", 2)
    context = grid.contexts[FIRST_NODE]
    context.node_config = RunConfig({**context.node_config, "data-path": str(folders[0])})
    wrapped = make_client(context).wrapped
    records = state_records(public_state(wrapped.model, wrapped.defense))
    content = RecordDict({**records, CONFIG: ConfigRecord({"server-round": 1, "victim": 0, "batch-size": 1})})

    (reply,) = grid.send_and_receive([Message(content, FIRST_NODE, "train.probe")])

    assert "A probe is expected by audited clients only" in (reply.error.reason or "")
