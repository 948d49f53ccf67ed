"""A training under audit, some of whose clients reply whatever a test says."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_privacy import audit, probe_mod
from fl_privacy.auditing.strategy import AuditedStrategy
from fl_privacy.flower import LocalGrid
from fl_privacy.flower.audit_protocol import asked_probe

HONEST, SIDE, CLASSES = 2, 6, 3
FIRST_NODE = 1000

Lie = Callable[[RecordDict, bool], None]
"""Changes the content of a reply; whether it is an answer to a probe."""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(SIDE * SIDE, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.sigmoid(self.fc1(x.flatten(1))))


def pictures(client: int, number: int = 4) -> list[tuple[Tensor, int]]:
    """Images of a client."""
    if not 0 <= client < 1000:
        raise ValueError(f"there is no partition {client}")
    drawn = torch.rand((number, 1, SIDE, SIDE), generator=torch.Generator().manual_seed(client))
    return [((image * 255).round() / 255, k % CLASSES) for k, image in enumerate(drawn)]


def train(net: nn.Module, loader: DataLoader) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


def own_pictures(context: Context, number: int = 4) -> list[tuple[Tensor, int]]:
    return pictures(int(context.node_config["partition-id"]), number)


def honest_app(number: int = 4) -> ClientApp:
    """Clients of so many images, each of which may be probed."""

    def own(context: Context) -> list[tuple[Tensor, int]]:
        return own_pictures(context, number)

    app = ClientApp(mods=[probe_mod(model=Small, train=train, dataset=own, images=number)])

    @app.train()
    def train_message(message: Message, context: Context) -> Message:
        net, data = Small(), own(context)
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        train(net, DataLoader(data, batch_size=4))
        metrics = MetricRecord({"num-examples": len(data)})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    return app


class LyingGrid(LocalGrid):
    """Nodes after the honest ones reply what their lie makes of an honest reply."""

    def __init__(self, lies: Mapping[int, Lie], clients: int) -> None:
        super().__init__(range(clients), honest_app())
        self._lies = lies

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if (lie := self._lies.get(message.metadata.dst_node_id - FIRST_NODE)) is not None and reply.has_content():
            lie(reply.content, asked_probe(message.content) is not None)
        return reply


def fedavg(clients: int) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)


def trained(strategy: Strategy, lies: Mapping[int, Lie], clients: int) -> Result:
    """Train for a round with ``strategy`` and return the result."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        initial = ArrayRecord(Small().state_dict())
    random.seed(0)  # the order of clients, hence of sums, is drawn
    return strategy.start(LyingGrid(lies, clients), initial, num_rounds=1, train_config=ConfigRecord({"lr": 0.1}))


def audited(
    lies: Mapping[int, Lie],
    clients: int,
    out: Path,
    around: Callable[[FedAvg], Strategy] = lambda strategy: strategy,
    attack: Any = "analytic",
) -> tuple[AuditedStrategy, dict[str, bytes], dict[str, Any]]:
    """Run an audit; return strategy, final weights as bytes, and rows of honest clients' images by id."""
    strategy = audit(around(fedavg(clients)), model=Small, data=pictures, out=out, attack=attack, victims=2 * clients)
    result = trained(strategy, lies, clients)
    return strategy, as_bytes(result), rows_of_honest(out)


def as_bytes(result: Result) -> dict[str, bytes]:
    """Of each of the final weights."""
    assert result.arrays is not None
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


def rows_of_honest(out: Path) -> dict[str, Any]:
    """Load what was recorded of the images of clients that tell the truth."""
    (folder,) = [path for path in out.glob("audit-*") if "previous" not in path.name]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        f"{r['id']} {r['image']} {r.get('attacker')}": {k: v for k, v in r.items() if k != "seconds"}
        for r in records
        if r["kind"] == "image" and r["client"] < HONEST
    }


def about(value: object) -> object:
    """Compare numbers up to their last bits, which depend on how many images a network gets at once."""
    return pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value
