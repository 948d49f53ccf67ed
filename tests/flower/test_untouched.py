"""Apps of all kinds that Flower's examples have, in a few lines each, audited as they are."""

import json
import random
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fl_privacy.errors import UserError
from fl_privacy.flower.grids import LocalGrid
from fl_privacy.flower.untouched.app import MOST_NODES, read_app
from fl_privacy.flower.untouched.audit import Asked, audit_app
from fl_privacy.flower.untouched.review import MOST_BYTES, review_app

PROJECT = """
[project]
name = "{name}"
version = "1"
dependencies = ["flwr>=1.41", "torch==2.11"]
[tool.flwr.app.components]
serverapp = "{name}.server:app"
clientapp = "{name}.client:app"
[tool.flwr.app.config]
num-server-rounds = 3
lr = 0.1
noise-multiplier = 1.0
"""

SERVER = """
import json, torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from {name}.client import initial
app = ServerApp()
@app.main()
def main(grid, context):
    torch.manual_seed(3)
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=2)
    result = strategy.start(grid, initial(), num_rounds=context.run_config["num-server-rounds"])
    if result.arrays is not None:
        torch.save({{k: torch.tensor(v.numpy()) for k, v in result.arrays.items()}}, "final.pt")
"""

HEAD = """
import numpy as np, torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
def images(context, n=40):
    g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x = torch.rand(n, 1, 6, 6, generator=g)
    x[:, :, 0, 0], x[:, :, 0, 1] = 0, 1
    return x, torch.randint(0, 4, (n,), generator=g)
def answer(msg, arrays, **metrics):
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=msg)
"""

CLASSIFIER = (
    HEAD
    + """
def Net(): return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 4))
def initial():
    torch.manual_seed(0)
    return ArrayRecord(Net().state_dict())
@app.train()
def train(msg, context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = images(context)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    optimizer, criterion = torch.optim.SGD(net.parameters(), lr=context.run_config["lr"], momentum=0.9), LOSS
    for a, b in loader:
        optimizer.zero_grad()
        criterion(net(a), b).backward()
        optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": len(x)})
"""
)

PLAIN = CLASSIFIER.replace("LOSS", "nn.CrossEntropyLoss()")

SMOOTHED = CLASSIFIER.replace("LOSS", "nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1., 2., 1., 1.]))")

HALF = PLAIN.replace(
    "ArrayRecord(net.state_dict()), **",
    "ArrayRecord({k: Array(v.half().numpy()) for k, v in net.state_dict().items()}), **",
)

NOISY = PLAIN.replace(
    "app = ClientApp()",
    """
def noisy(msg, context, call):
    reply = call(msg, context)
    record = reply.content.array_records["arrays"]
    for key, array in list(record.items()):
        record[key] = Array((array.numpy() + 1e-7).astype("float32"))
    return reply
app = ClientApp(mods=[noisy])""",
)

AUTOENCODER = (
    HEAD
    + """
class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(36, 20), nn.ReLU()), nn.Linear(20, 36)
    def forward(self, x): return self.encoder(x)
    def training_step(self, batch):
        x = batch[0].view(len(batch[0]), -1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)
def initial():
    torch.manual_seed(0)
    return ArrayRecord(Lit().state_dict())
@app.train()
def train(msg, context):
    net = Lit()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for batch in DataLoader(TensorDataset(*images(context)), batch_size=4):
        optimizer.zero_grad(); net.training_step(batch).backward(); optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": 40})
"""
)

VAE = (
    HEAD
    + """
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.mu, self.logvar, self.b = nn.Linear(36, 20), nn.Linear(20, 4), nn.Linear(20, 4), nn.Linear(4, 36)
    def forward(self, x):
        h = torch.tanh(self.a(x.flatten(1)))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.b(z).view_as(x), mu, logvar
def initial():
    torch.manual_seed(0)
    return ArrayRecord(Vae().state_dict())
@app.train()
def train(msg, context):
    net = Vae(); net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x, _ in DataLoader(TensorDataset(*images(context)), batch_size=4):
        made, mu, logvar = net(x)
        loss = F.mse_loss(made, x) - 0.5 * torch.mean(1 + logvar - mu ** 2 - logvar.exp())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": 40})
"""
)

TABULAR = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(7, 32), nn.Linear(32, 1)
    def forward(self, x): return torch.sigmoid(self.two(torch.relu(self.one(x))))
def initial():
    torch.manual_seed(0)
    return ArrayRecord(Net().state_dict())
@app.train()
def train(msg, context):
    net = Net(); net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x = torch.randn(60, 7, generator=g); y = (x[:, :1] > 0).float()
    optimizer, criterion = torch.optim.SGD(net.parameters(), lr=0.05), nn.BCELoss()
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        optimizer.zero_grad(); criterion(net(a), b).backward(); optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": 60})
"""
)

LANGUAGE = (
    HEAD
    + """
from dataclasses import dataclass
@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(300, 16, padding_idx=0), nn.Linear(16, 2)
    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask[..., None].float()
        logits = self.head(torch.tanh((self.words(input_ids) * mask).sum(1) / mask.sum(1)))
        return Output(F.cross_entropy(logits, labels), logits)
def initial():
    torch.manual_seed(0)
    return ArrayRecord(Model().state_dict())
def collate(rows):
    ids = torch.stack([r[0] for r in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.stack([r[1] for r in rows])}
@app.train()
def train(msg, context):
    net = Model(); net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    ids = torch.randint(1, 300, (24, 9), generator=g); ids[:, 7:] = 0
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    data = TensorDataset(ids, torch.randint(0, 2, (24,), generator=g))
    for batch in DataLoader(data, batch_size=4, collate_fn=collate):
        optimizer.zero_grad(); net(**batch).loss.backward(); optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": 6})
"""
)

HEAD_ONLY = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 30), nn.ReLU())
        self.heads = nn.Sequential(nn.Linear(30, 4))
        self.body.requires_grad_(False)
    def forward(self, x): return self.heads(self.body(x))
def initial(): return ArrayRecord(Net().heads.state_dict())
@app.train()
def train(msg, context):
    net = Net(); net.heads.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for x, y in DataLoader(TensorDataset(*images(context)), batch_size=4):
        optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
    return answer(msg, ArrayRecord(net.heads.state_dict()), **{"num-examples": 40})
"""
)

WRAPPED = PLAIN.replace(
    "    optimizer, criterion",
    """
    class GradSampleModule(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._module = module
        def forward(self, x): return self._module(x)
    net = GradSampleModule(net)
    optimizer, criterion""",
).replace("ArrayRecord(net.state_dict()), **", "ArrayRecord(net._module.state_dict()), **")

LISTED = (
    """
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.app import ArrayRecord
"""
    + HEAD.split("app = ClientApp()", maxsplit=1)[0]
    + "def images"
    + HEAD.split("def images")[1]
    + """
from flwr.client import ClientApp, NumPyClient
def Net(): return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 4))
class Client(NumPyClient):
    def __init__(self, context): self.context, self.net = context, Net()
    def get_parameters(self, config): return [v.numpy() for v in self.net.state_dict().values()]
    def fit(self, parameters, config):
        self.net.load_state_dict({k: torch.tensor(v) for k, v in zip(self.net.state_dict(), parameters)})
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for x, y in DataLoader(TensorDataset(*images(self.context)), batch_size=4):
            optimizer.zero_grad(); F.cross_entropy(self.net(x), y).backward(); optimizer.step()
        return self.get_parameters({}), 40, {}
def client_fn(context): return Client(context).to_client()
app = ClientApp(client_fn)
"""
)

LEGACY_SERVER = """
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
import torch
from {name}.client import Net
def server_fn(context):
    torch.manual_seed(0)
    initial = ndarrays_to_parameters([v.numpy() for v in Net().state_dict().values()])
    strategy = FedAvg(fraction_evaluate=0.0, initial_parameters=initial)
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    return ServerAppComponents(strategy=strategy, config=config)
app = ServerApp(server_fn=server_fn)
"""

LINEAR = (
    HEAD
    + """
def initial(): return ArrayRecord([np.zeros((3, 4), "float32"), np.zeros(3, "float32")])
@app.train()
def train(msg, context):
    weights = [w + 1 for w in msg.content["arrays"].to_numpy_ndarrays()]
    return answer(msg, ArrayRecord(weights), **{"num-examples": 30, "accuracy": 0.5})
"""
)

TREES = (
    HEAD
    + """
import json
def initial(): return ArrayRecord([np.zeros(0, "uint8")])
@app.train()
def train(msg, context):
    text = json.dumps({"learner": {"trees": [{"split_conditions": [37.5], "sum_hessian": [12.0]}]}}).encode()
    return answer(msg, ArrayRecord([np.frombuffer(text, "uint8")]), **{"num-examples": 30})
"""
)

QUERY_SERVER = """
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    for kind in ("query.times", "query.embed"):
        grid.send_and_receive([Message(RecordDict(), dst_node_id=n, message_type=kind) for n in grid.get_node_ids()])
"""

QUERY = (
    HEAD
    + """
@app.query("times")
def times(msg, context):
    x, y = images(context)
    (found,) = DataLoader(TensorDataset(x.flatten(1), y), batch_size=40)
    return Message(RecordDict({"data": ArrayRecord({"X": Array(found[0].numpy())}),
        "metrics": MetricRecord({"classes": torch.bincount(y, minlength=4).tolist()}),
        "state": ConfigRecord({"blob": b"\\x80\\x04abc.", "who": "ann@hospital.org"})}), reply_to=msg)
@app.query("embed")
def embed(msg, context):
    raise RuntimeError("no such thing\\nsecond line")
"""
)


def write(folder: Path, name: str, client: str, server: str = SERVER) -> Path:
    package = folder / name
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name))
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text(textwrap.dedent(client))
    (package / "server.py").write_text(server.format(name=name) if "{name}" in server else server)
    return folder


def audited(folder: Path, name: str, client: str, server: str = SERVER, **asked: Any) -> dict[str, Any]:
    app = read_app(write(folder / "app", name, client, server))
    told = {"nodes": 2, "clients": 2, "victims": 2, "out": folder / "out", "seconds": 0.0, **asked}
    found = audit_app(app, Asked(**told))
    page = found.page.read_text()
    assert found.record["headline"] in page.replace("&#39;", "'")
    assert json.loads((found.page.parent / "audit.json").read_text())["app"] == name
    return dict(found.record)


def rung(record: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in record["rungs"] if each["rung"] == name)


@pytest.mark.parametrize(
    ("name", "client", "server", "kind"),
    [
        ("app_plain", PLAIN, SERVER, "image"),
        ("app_smoothed", SMOOTHED, SERVER, "image"),
        ("app_noisy", NOISY, SERVER, "image"),
        ("app_wrapped", WRAPPED, SERVER, "image"),
        ("app_autoencoder", AUTOENCODER, SERVER, "row"),
        ("app_vae", VAE, SERVER, "image"),
        ("app_tabular", TABULAR, SERVER, "row"),
        ("app_language", LANGUAGE, SERVER, "text"),
        ("app_listed", LISTED, LEGACY_SERVER, "image"),
        ("app_half", HALF, SERVER, "image"),
        ("app_heads", HEAD_ONLY, SERVER, "image"),
    ],
)
def test_networks_are_attacked(tmp_path: Path, name: str, client: str, server: str, kind: str) -> None:
    record = audited(tmp_path, name, client, server)
    first = rung(record, "gradient")
    assert not record["problems"]
    assert first["kind"] == kind, first["reason"]
    assert first["counts"]["judged"] + first["counts"]["failures"] == 2
    if name not in ("app_vae", "app_heads"):
        assert first["counts"]["read"] == 2, first
        assert first["control"]["read"] == 0
    one = rung(record, "one")
    assert one["counts"] is not None, one["reason"]
    if name in ("app_plain", "app_smoothed", "app_listed", "app_wrapped", "app_tabular", "app_language"):
        assert one["counts"]["read"] == 2 and record["tone"] == "leak", one
    assert rung(record, "all")["counts"] is None and "not a protection" in rung(record, "all")["reason"]


@pytest.mark.parametrize(
    ("name", "client", "text"), [("app_linear", LINEAR, ""), ("app_trees", TREES, "decision trees")]
)
def test_other_frameworks_have_an_inventory(tmp_path: Path, name: str, client: str, text: str) -> None:
    record = audited(tmp_path, name, client)
    assert record["rungs"] == [] and record["tone"] == "open"
    assert record["headline"].startswith("Not attacked")
    assert {line["key"] for line in record["inventory"]} >= {"0", "num-examples"}
    assert bool(text) == any(text in finding["what"] for finding in record["findings"])


def test_data_in_replies_come_first(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_query", QUERY, QUERY_SERVER)
    assert record["tone"] == "leak"
    assert record["headline"].startswith("Clients send data as they are: 40 of 40 rows")
    assert record["problems"] == ["RuntimeError: no such thing (2 replies)"]
    found = {finding["where"]: finding["severity"] for finding in record["findings"]}
    assert found == {"data/X": "data", "metrics/classes": "facts", "state/who": "facts", "state/blob": "look"}


def test_the_training_is_unchanged(tmp_path: Path) -> None:
    """Final arrays are those of the app without an audit, bit for bit."""
    audited(tmp_path, "app_unchanged", PLAIN, rounds=2, victims=1)
    app = read_app(tmp_path / "app")
    server, client = app.load()
    config = app.with_config((), 2)
    grid = LocalGrid([0, 1], client)
    for context in grid.contexts.values():
        context.run_config = dict(config)
    (tmp_path / "bare").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "bare")
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config)))
    ours = torch.load(tmp_path / "out" / "audit-app_unchanged" / "files" / "final.pt")
    bare = torch.load(tmp_path / "bare" / "final.pt")
    assert all(torch.equal(ours[name], bare[name]) for name in bare)


def test_the_last_round_is_a_rung_of_its_own(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_rounds", PLAIN, rounds=2, victims=1, seconds=600.0)
    assert rung(record, "batch")["counts"]["judged"] == 4
    assert rung(record, "later")["counts"] is not None


def test_an_app_is_read_without_being_run(tmp_path: Path) -> None:
    client = (
        PLAIN.replace("ClientApp()", "ClientApp(mods=[fixedclipping_mod, own])") + "\nimport pickle\nraise SystemExit"
    )
    found = review_app(write(tmp_path, "app_read", client))
    assert [note.what.partition(":")[0] for note in found.protections] == ["fixedclipping_mod"]
    assert [note.what for note in found.mods] == ["own"]
    assert [note.what for note in found.strategies] == ["FedAvg"]
    assert [note.what for note in found.pickles] == ["pickle"]
    assert found.pins == {"flwr>=1.41": False, "torch==2.11": True}
    assert found.settings == {"noise-multiplier": 1.0}
    assert "Not pinned to a version: flwr>=1.41." in found.in_words()


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (None, (), "pyproject.toml"),
        ("[tool", (), "TOML"),
        ("[project]\nname = 'a'", (), "serverapp and clientapp"),
        ("tool = 'x'\nproject = 1", (), "serverapp and clientapp"),
        ("[tool.flwr]\napp = []\nfederations = 'none'", (), "serverapp and clientapp"),
        ("#" * (1 << 21), (), "at most 1024 KiB"),
        (PROJECT.format(name="a"), ("nothing=1",), "nothing"),
        (PROJECT.format(name="a"), ("lr='fast'",), "like 0.1"),
    ],
)
def test_a_wrong_app_is_one_line(tmp_path: Path, text: str | None, overrides: tuple[str, ...], said: str) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_app(tmp_path).with_config(overrides, None)


def test_an_app_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    app = read_app(write(tmp_path / "app", "app_broken", "import no_such_package"))
    with pytest.raises(UserError, match="no_such_package"):
        audit_app(app, Asked(nodes=2, out=tmp_path / "out"))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"no archive"])
def test_a_damaged_bundle_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "app.fab").write_bytes(content)
    with pytest.raises(UserError, match="flwr build"):
        read_app(tmp_path / "app.fab")


def test_an_app_comes_out_of_its_bundle_and_nothing_of_it_lands_elsewhere(tmp_path: Path) -> None:
    folder = write(tmp_path / "app", "app_bundled", PLAIN)
    with zipfile.ZipFile(tmp_path / "app.fab", "w") as bundle:
        for file in folder.rglob("*"):
            bundle.write(file, file.relative_to(folder))
    assert read_app(tmp_path / "app.fab").client == read_app(folder).client
    with zipfile.ZipFile(tmp_path / "app.fab", "a") as bundle:
        bundle.writestr("../elsewhere.py", "")
    with pytest.raises(UserError, match="stay in its folder"):
        read_app(tmp_path / "app.fab")


def test_what_a_review_does_not_read_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path, "app_large", PLAIN)
    (folder / "large.py").write_text("import pickle\n" + "#" * MOST_BYTES)
    (folder / "damaged.py").write_text("def (")
    words = review_app(folder).in_words()
    assert "Not read: large.py (larger than" in words and "Not read: damaged.py" in words


def test_no_file_asks_for_any_number_of_clients(tmp_path: Path) -> None:
    folder = write(tmp_path, "app_many", PLAIN)
    project = folder / "pyproject.toml"
    project.write_text(project.read_text() + "\n[tool.flwr.federations.local]\noptions.num-supernodes = 1000000000\n")
    assert read_app(folder).nodes == MOST_NODES
