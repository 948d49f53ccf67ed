"""How apps are run when they are audited: nodes, bundles, audits of their own, and what whole trainings tell."""

import gc
import json
import math
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.server.client_manager import SimpleClientManager
from flwr.server.compat import app_utils
from flwr.serverapp.strategy import strategy_utils

from fl_privacy.auditing.app import tapped_grid
from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.check import stops_of
from fl_privacy.auditing.clear_text.findings import Loaded, findings_of
from fl_privacy.auditing.clear_text.inventory import Sent
from fl_privacy.auditing.scenario_problem import reason_of
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure
from fl_privacy.flower.grids import LocalGrid
from fl_privacy.measure.aggregate_leakage import ClassTrace, class_trace, leaked_classes, leaked_members, leaked_words
from tests.flower.untouched_apps import (
    HEAD,
    LANGUAGE,
    LEGACY_SERVER,
    LISTED,
    PLAIN,
    SERVER,
    attacked_only,
    audited,
    rung,
    write,
)

UNEVEN = PLAIN.replace(
    "    x, y = images(context)\n",
    """
    x, y = images(context, 60)
    own = int(context.node_config["partition-id"])
    g = torch.Generator().manual_seed(own)
    y = torch.where(torch.rand(60, generator=g) < 0.6, own % 4, y)
""",
)

ALREADY = SERVER.replace(
    "    result = strategy",
    """
    from fl_privacy import audit
    from {name}.client import Net, images
    from torch.utils.data import TensorDataset
    data = lambda client: TensorDataset(*images(type("C", (), dict(node_config={{"partition-id": client}}))))
    strategy = audit(strategy, model=Net, data=data, plan=context, out="own")
    result = strategy""",
)

PLACED = PLAIN.replace(
    "    net = Net()\n",
    '    assert context.node_config["path"] == f"part-{context.node_config[\'partition-id\']}"\n    net = Net()\n',
)

OPENING = PLAIN.replace(
    "    net = Net()\n",
    """
    with open("data/rows.csv", "r+") as file:
        assert file.read() in "12"
        file.seek(0)
        file.write("2")
    net = Net()
""",
)

TAKING = PLAIN.replace(
    "app = ClientApp()",
    """
def taking(msg, context, call):
    msg.content["taken"] = msg.content.config_records["config"]
    assert msg.content.config_records["config"].pop("lr") == 0.1
    return call(msg, context)
app = ClientApp(mods=[taking])""",
)


PROBED = PLAIN.replace("app = ClientApp()\n", "").replace(
    "@app.train()",
    """
from fl_privacy import probe_mod
def fit(net, loader):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(a), b).backward()
        optimizer.step()
app = ClientApp(mods=[probe_mod(model=Net, train=fit, dataset=lambda context: TensorDataset(*images(context)))])
@app.train()""",
)


def survivor(record: dict, name: str) -> dict:
    return next(each for each in record["survivors"] if each["name"] == name)


def test_a_server_that_waits_for_more_clients_gets_them(tmp_path: Path) -> None:
    server = SERVER.replace("min_available_nodes=2", "min_available_nodes=3")
    record = audited(tmp_path, "app_waits", PLAIN, server, only=())
    assert record["problems"] == ["The app waits for more than 2 clients; 1 joined."]
    assert "with 3 clients" in (tmp_path / "out" / "audit-app_waits" / "report.html").read_text()


def test_as_many_clients_as_a_server_of_flower_waits_for_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(strategy_utils, "sleep")
    grid = tapped_grid.TappedGrid([0], ClientApp(), {}, 1, tables={}, node_config={})
    chosen, everybody = strategy_utils.sample_nodes(grid, 400, 5)
    assert len(chosen) == 5 and len(everybody) == 400 and grid.joined == 399


@pytest.mark.parametrize(("wanted", "nodes"), [(0, 1), (2, 2)])
def test_no_node_joins_a_server_that_is_busy(monkeypatch: pytest.MonkeyPatch, wanted: int, nodes: int) -> None:
    monkeypatch.setattr(tapped_grid, "WAITED", 0.0)
    grid = tapped_grid.TappedGrid([0], ClientApp(), {}, 1, tables={}, node_config={})
    manager, turns = SimpleClientManager(), iter(range(40))
    ends: Any = SimpleNamespace(is_set=lambda: next(turns) > 30 or len(grid.contexts) > 1, wait=lambda seconds: None)
    asks = {"target": app_utils._update_client_manager, "args": (grid, manager, ends, threading.Event())}
    threads = [threading.Thread(target=manager.wait_for, args=(wanted, 30)), threading.Thread(**asks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert len(grid.contexts) == nodes and not any(each.is_alive() for each in threads)


def test_an_app_finds_its_own_files_and_changes_copies_of_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "app", "app_own_files", OPENING)
    (folder / "data").mkdir()
    (folder / "data" / "rows.csv").write_text("1")
    (folder / "elsewhere").symlink_to(tmp_path)
    audit_app(read_app(folder), AppAuditRequest(nodes=2, clients=2, victims=1, out=folder, seconds=0.0))
    again = audit_app(read_app(folder), AppAuditRequest(nodes=2, clients=2, victims=1, out=folder, seconds=0.0))
    assert not again.content["problems"]
    assert (folder / "data" / "rows.csv").read_text() == "1", "the user's file is as it was"
    assert (again.page.parent / "files" / "data" / "rows.csv").read_text() == "2"
    kept = {str(file.relative_to(again.page.parent / "files")) for file in (again.page.parent / "files").rglob("*")}
    assert kept == {"data", "data/rows.csv", "final.pt", "pyproject.toml"}, (
        "neither code, nor links, nor the audit's own folder"
    )


def test_an_audit_within_the_app_is_left_out(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_already", PLAIN, ALREADY, only=("one",))
    assert record["notes"] == ["The app's own audit(...) was skipped in this run; its training was not."]
    assert record["problems"] == []
    assert rung(record, "one")["counts"]["read"] == 2
    assert not (tmp_path / "out" / "audit-app_already" / "files" / "own").exists()


@pytest.mark.long
def test_two_lines_in_the_app_come_to_the_same_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = audited(tmp_path, "app_probed", PROBED, ALREADY, only=("one",))
    monkeypatch.chdir(tmp_path)
    app = read_app(tmp_path / "app")
    begun = app.load(stops_of)
    server, client = begun.server, begun.client
    grid = LocalGrid(range(2), client)
    for node in grid.contexts.values():
        node.run_config = dict(app.config)
    server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(app.config)))
    (summary,) = (tmp_path / "own").glob("audit-*/summary.json")
    verdict = json.loads(summary.read_text())["verdict"]
    assert (verdict["tone"], verdict["ground"], verdict["uploads"]) == (record["tone"], "read", "probes")
    counts = rung(record, "one")["counts"]
    assert counts["read"] == counts["judged"]
    assert verdict["most"]["read"] == verdict["most"]["judged"]


def test_settings_that_an_app_reads_and_nothing_sets_are_usual_ones(tmp_path: Path) -> None:
    reads = """
    own = context.node_config
    assert own["dataset-path"] == f"parts/{'ab'[own['partition-id']]}" and own["client-id"] == own["partition-id"]
    assert own["save-dir"] == "data" and "log-dir" not in own
    logs = own["log-dir"] if "log-dir" in own else None
    net = Net()
"""
    server = SERVER.replace("min_available_nodes=2", "min_available_nodes=int(context.run_config['num-clients'])")
    folder = write(tmp_path / "app", "app_unset", PLAIN.replace("    net = Net()\n", reads), server)
    (folder / "README.md").write_text(
        "flower-supernode --node-config 'partition-id=0 dataset-path=\"parts/a\"'\n"
        "flower-supernode --node-config 'partition-id=1 dataset-path=\"parts/b\"'\n"
    )
    with attacked_only({"one"}):
        asked = AppAuditRequest(nodes=2, clients=2, victims=2, out=tmp_path / "out", seconds=0.0)
        record = audit_app(read_app(folder), asked).content
    assert rung(record, "one")["counts"]["read"] == 2
    assert record["problems"] == [
        "Nothing sets num-clients of its run config: 2 was taken",
        "Nothing sets client-id of its node config: {partition} was taken",
        "Nothing sets dataset-path of its node config: {partition:parts/a|parts/b} was taken",
        "Nothing sets save-dir of its node config: data was taken",
    ]


def test_nodes_have_the_config_that_is_asked_for(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_placed", PLACED, node_config=('path="part-{partition}"',), only=("one",))
    assert not record["problems"] and rung(record, "one")["counts"]["read"] == 2
    with pytest.raises(UserError, match="--node-config"):
        audit_app(read_app(tmp_path / "app"), AppAuditRequest(node_config=("nonsense",), out=tmp_path / "out"))


def test_each_node_gets_a_message_of_its_own(tmp_path: Path) -> None:
    """As on the wire: a mod that takes an entry out takes it from no other node."""
    server = SERVER.replace("initial(), num", "initial(), train_config=ConfigRecord({{'lr': 0.1}}), num")
    record = audited(tmp_path, "app_taking", TAKING, server, only=())
    assert not record["problems"]


def test_a_bundle_is_audited_as_its_folder_and_leaves_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "app", "app_fab", PLAIN)
    with zipfile.ZipFile(tmp_path / "app.fab", "w") as bundle:
        for file in folder.rglob("*"):
            bundle.write(file, file.relative_to(folder))
    app = read_app(tmp_path / "app.fab")
    place = app.folder
    found = audit_app(app, AppAuditRequest(nodes=2, clients=2, victims=2, out=tmp_path / "out", seconds=0.0))
    assert rung(dict(found.content), "one")["counts"]["read"] == 2
    assert place.is_dir()
    del app
    gc.collect()
    assert not place.exists()


@pytest.mark.long
@pytest.mark.parametrize("client", [UNEVEN, LISTED])
def test_whole_trainings_tell_classes(tmp_path: Path, client: str) -> None:
    legacy = client is LISTED
    name = "app_listed_uneven" if legacy else "app_uneven"
    if legacy:
        record = audited(tmp_path, name, client, LEGACY_SERVER, nodes=4, only=())
    else:
        record = audited(tmp_path, name, client, nodes=4, only=())
    found = survivor(record, "classes")
    assert found["found"]["low"] <= found["found"]["value"] <= found["found"]["high"]
    if not legacy:
        assert found["told"] and found["found"]["value"] > 0.7 and found["control"]["value"] < 0.2
        members = survivor(record, "members")  # of the same classes, or these would tell clients apart
        assert "of the same class" in members["made"] and members["found"]["value"] < 0.7, members


def test_whole_trainings_tell_words(tmp_path: Path) -> None:
    found = survivor(audited(tmp_path, "app_words", LANGUAGE, nodes=3, clients=3, only=()), "words")
    assert found["told"] and found["found"]["value"] > 0.95, found


RATED = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.users, self.films = nn.Embedding(500, 4), nn.Embedding(300, 4)
    def forward(self, users, films): return (self.users(users) * self.films(films)).sum(1)
def films(net): return {"films.weight": net.state_dict()["films.weight"]}
def initial(): return ArrayRecord(films(Net()))
@app.train()
def train(msg, context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict(), strict=False)
    g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    rated = TensorDataset(
        torch.randint(0, 500, (60,), generator=g),
        torch.randint(1, 300, (60,), generator=g),
        torch.randint(1, 6, (60,), generator=g),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=context.run_config["lr"])
    for a, b, y in DataLoader(rated, batch_size=10):
        optimizer.zero_grad()
        F.mse_loss(net(a, b), y.float()).backward()
        optimizer.step()
    return answer(msg, ArrayRecord(films(net)), **{"num-examples": 60})
"""
)


def test_films_that_a_client_has_rated_are_told_by_the_rows_that_moved(tmp_path: Path) -> None:
    found = survivor(audited(tmp_path, "app_rated", RATED, nodes=3, clients=3, rounds=1, only=()), "words")
    assert found["told"] and found["found"]["value"] > 0.95, found
    assert found["control"]["value"] < 0.5


def test_the_class_trace_is_of_the_last_bias() -> None:
    sent = {"a/w": np.zeros((3, 4)), "a/b": np.zeros(3), "a/n": np.zeros((), int)}
    up = {"r/w": np.ones((3, 4)), "r/b": np.array([1.0, 2.0, 0.0]), "r/n": np.ones((), int)}
    found = class_trace(sent, up, np.array([0, 1, 1, 2]))
    assert found is not None and found.change.tolist() == [1.0, 2.0, 0.0] and found.counts.tolist() == [1, 2, 1]
    assert class_trace(sent, up, np.array([0, 7])) is None
    assert class_trace(sent, up, None) is None
    assert class_trace(sent, {**up, "r/b": np.full(3, np.nan)}, np.array([0, 1])) is None


def test_nothing_is_told_of_noise() -> None:
    rng = np.random.default_rng(0)
    traces = [ClassTrace(change=rng.normal(size=10), counts=rng.integers(1, 20, 10).astype(float)) for _ in range(6)]
    found = leaked_classes(traces)
    assert found.estimate is not None and not found.leaks and found.estimate.low < 0 < found.estimate.high
    few = leaked_classes(traces[:1])
    assert few.estimate is None and "3 clients" in few.reason
    same = [ClassTrace(change=rng.normal(size=10), counts=np.ones(10)) for _ in range(4)]
    assert "same share" in leaked_classes(same).reason
    losses = rng.normal(size=(4, 50))
    assert not leaked_members(losses[0], losses[1], (losses[2], losses[3]), "").leaks
    apart = leaked_members(losses[0] + 9, losses[1], (losses[2], losses[3]), "")
    assert apart.leaks and apart.estimate is not None and apart.estimate.value == 1.0
    words = [({1, 2, k}, {1, 2, k}) for k in (3, 4, 5)]
    assert leaked_words(words).leaks
    assert not leaked_words([(own, {1, 2, 9}) for own, _ in words]).leaks


def test_casts_that_do_nothing_are_no_part_of_the_way(tmp_path: Path) -> None:
    """``labels.to(device)`` in front of a plain cross entropy leaves it plain, so that its labels are found."""
    client = PLAIN.replace("criterion(net(a), b)", 'criterion(net(a.to("cpu")), b.to("cpu"))')
    record = audited(tmp_path, "app_moves", client, only=("gradient",))
    assert rung(record, "gradient")["labels"] == [2, 2]
    assert any("The loss is cross entropy" in note for note in rung(record, "gradient")["notes"])


NORMED = PLAIN.replace(
    "nn.Linear(36, 24), nn.Sigmoid()", "nn.Linear(36, 24), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Sigmoid()"
)


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_evaluation_mode_is_a_rung_where_it_makes_a_difference(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_normed", NORMED, only=("evaluation", "gradient"))
    first = record["rungs"][0]
    assert first["rung"] == "evaluation" and not first["uploaded"]
    assert first["counts"]["read"] == 2 and first["labels"] == [2, 2], first
    assert "2 examples, as its code (such as batch norm) takes no fewer," in rung(record, "gradient")["made"]
    plain = audited(tmp_path / "plain", "app_not_normed", PLAIN, only=())
    assert next(each["rung"] for each in plain["rungs"]) == "gradient"


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_pairs_behind_batch_norm_are_reconstructed_from_running_statistics(tmp_path: Path, optimizer: str) -> None:
    """Each upload of two examples, the fewest that its code takes, also holds their mean and variance."""
    layers = "nn.Linear(36, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3)"
    client = PLAIN.replace("nn.Linear(36, 24), nn.Sigmoid()", layers).replace("nn.Linear(24", "nn.Linear(64")
    if optimizer == "Adam":
        client = client.replace("torch.optim.SGD", "torch.optim.Adam").replace(", momentum=0.9", "")
    record = audited(tmp_path, f"app_pairs_{optimizer.lower()}", client, only=("gradient", "one"))
    for name in ("gradient", "one"):
        assert rung(record, name)["counts"]["read"] == 4, rung(record, name)
        assert not rung(record, name)["control"]["read"]


def test_figures_of_columns_and_histograms_are_facts() -> None:
    ages = np.array([20.5, 31.0, 44.0, 44.0, 61.5, 70.0])
    loaded = Loaded(columns={"age": ages})
    values = {
        "m/total": float(ages.sum()),
        "m/squares": float((ages**2).sum()),
        "m/bins": [1, 1, 3, 1],
        "m/other": 12.5,
        "m/few": [1, 1, 1, 1],
    }
    sent = Sent(direction="client to server", kind="query", round=1, node=1, values=values)
    found = {leak.where: leak.what for leak in findings_of(sent, loaded, (), trained=False)}
    assert found == {
        "m/total": "the sum of the column age over the client's 6 examples",
        "m/squares": "the sum of squares of the column age over the client's 6 examples",
        "m/bins": "a histogram of the client's 6 examples",
    }


def test_an_odd_figure_hides_nothing_and_sizes_nothing() -> None:
    rows = np.arange(40.0).reshape(10, 4)
    loaded = Loaded(rows=[rows], labels=np.array([3, 2**62]), examples=10)
    arrays = {"a/rows": rows, "a/counts": np.ones(4)}
    values = {"m/num-examples": math.inf, "m/n": math.nan, "m/shares": [0.5, 0.5]}
    sent = Sent(direction="client to server", kind="train", round=1, node=1, arrays=arrays, values=values)
    found = {leak.where: leak.what for leak in findings_of(sent, loaded, (), trained=False)}
    assert found == {"a/rows": "10 of 10 rows are examples of the client, value by value"}


@pytest.mark.parametrize(
    ("seen", "severity", "said"),
    [(1, "facts", "has 1 example"), (0, "look", "perhaps a placeholder"), (64, "look", "was seen to load 64")],
)
def test_a_count_that_an_app_fills_in_is_no_fact(seen: int, severity: str, said: str) -> None:
    sent = Sent(direction="client to server", kind="train", round=1, node=1, values={"m/num-examples": 1})
    (found,) = findings_of(sent, Loaded(examples=seen), (), trained=True)
    assert (found.severity, said in found.what) == (severity, True)


def test_words_whose_embedding_does_not_leave_are_said_to_be_not_attacked(tmp_path: Path) -> None:
    frozen = LANGUAGE.replace("    optimizer =", "    net.words.requires_grad_(False)\n    optimizer =")
    frozen = frozen.replace("ArrayRecord(net.state_dict())", "ArrayRecord(net.head.state_dict())")
    frozen = frozen.replace("ArrayRecord(Model().state_dict())", "ArrayRecord(Model().head.state_dict())")
    frozen = frozen.replace("net = Model(); net.load", "torch.manual_seed(0); net = Model(); net.head.load")
    record = audited(tmp_path, "app_frozen_words", frozen, only=("one",))
    assert "rows of the embedding, which are not uploaded" in rung(record, "one")["reason"]


def test_an_attack_that_breaks_says_nothing_of_the_app() -> None:
    assert reason_of(Failure("NotAttackedError: no loss was seen")) == "no loss was seen"
    assert "says nothing about the app (AssertionError: odd)" in reason_of(Failure("AssertionError: odd"))


LYING = PLAIN.replace(
    "app = ClientApp()",
    """
def lying(msg, context, call):
    reply = call(msg, context)
    if int(context.node_config["partition-id"]) == 3:
        arrays = reply.content["arrays"]
        for key, array in list(arrays.items()):
            arrays[key] = Array(array.numpy() * np.float32("nan"))
        reply.content["metrics"]["num-examples"] = 10**18
        reply.content["more"] = MetricRecord({"num-examples": 1e18})
    return reply
app = ClientApp(mods=[lying])""",
)


def test_nonsense_of_one_client_costs_its_own_rows(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_lying", LYING, nodes=4, clients=4, victims=4, rounds=1, only=("one",))
    counts = rung(record, "one")["counts"]
    assert (counts["read"], counts["judged"], counts["failures"]) == (3, 3, 1)
    assert survivor(record, "members")["found"] is not None
    assert survivor(record, "classes")["found"] is not None
