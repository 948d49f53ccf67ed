"""Flower apps of many kinds, in a few lines each, and their audits."""

import json
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.scenarios import SCENARIOS, Scenarios, scenario_of
from fl_privacy.auditing.session import AuditSession
from fl_privacy.measure.answer import Answer

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

OWN_SERVER = """
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
from {name}.client import initial
app = ServerApp()
@app.main()
def main(grid, context):
    asked = [RecordDict({{"arrays": initial()}}) for _ in grid.get_node_ids()]
    grid.send_and_receive([Message(c, n, "train") for c, n in zip(asked, grid.get_node_ids())])
"""
"""Of an app that sends one message to each client, {name}."""

BEGUN = """def initial():
    torch.manual_seed(0)
    return ArrayRecord(Net().state_dict())
@app.train()
def train(msg, context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
"""
"""What each client app has after its ``Net``: initial values, and a training that begins at those sent."""

CLASSIFIER = (
    HEAD
    + """
def Net(): return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 4))
"""
    + BEGUN
    + """    x, y = images(context)
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


@contextmanager
def written_once() -> Iterator[None]:
    """Within it an audit writes its page at its end alone, not at each of its ten answers too."""
    write_page = AuditSession.write

    def write_at_the_end(session: AuditSession, going_on: str = "") -> Any:
        return session.record(going_on) if going_on else write_page(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuditSession, "write", write_at_the_end)
        yield


@contextmanager
def attacked_only(names: Collection[str]) -> Iterator[None]:
    """Within it an audit attacks no scenario but these; each of the others says that it was left out."""
    by_name = {"site": "_of_site", "batch": "_one_batch", "all": "_whole_training"}

    def left_out(name: str) -> Answer:
        return Answer(scenario=scenario_of(name), reason="left out")

    def singly(scenarios: Scenarios, name: str, *found: Any, attack: Any = Scenarios._singly) -> Answer:
        return attack(scenarios, name, *found) if name in names else left_out(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scenarios, "_singly", singly)
        for name in by_name.keys() - names:
            patch.setattr(Scenarios, by_name[name], lambda *_, name=name: left_out(name))
        yield


def audited(
    folder: Path, name: str, client: str, server: str = SERVER, only: Collection[str] = SCENARIOS, **asked: Any
) -> dict[str, Any]:
    """Audit an app of two clients in no time beyond the first attacks, of the scenarios in ``only``."""
    app = read_app(write(folder / "app", name, client, server))
    told = {"nodes": 2, "clients": 2, "victims": 2, "out": folder / "out", "seconds": 0.0, **asked}
    with written_once(), attacked_only({*only}):
        found = audit_app(app, AppAuditRequest(**told))
    page = found.page.read_text()
    assert found.content["headline"] in page.replace("&#39;", "'")
    assert json.loads((found.page.parent / "audit.json").read_text())["app"] == name
    return dict(found.content)


def rung(record: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in record["rungs"] if each["rung"] == name)
