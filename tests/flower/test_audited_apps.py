"""Twelve apps that draw at random in five ways come to the same bytes, audited and not."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    FedAdam,
    FedAvgM,
    FedProx,
    Strategy,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from fl_privacy import audit, probe_mod
from fl_privacy.defenses import pruning
from fl_privacy.flower import LocalGrid, Sane, defense_mod
from tests.flower import liars
from tests.flower.liars import CLASSES, SIDE, Small, as_bytes
from tests.flower.test_audit_apart import DRAWS, Augmented

pytestmark = pytest.mark.usefixtures("undrawn_charts")

CLIENTS, ROUNDS = 2, 2


class Convolution(nn.Sequential):
    """Of four channels, with whatever normalization."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(4 * SIDE * SIDE, CLASSES)
        )


class Dropping(nn.Sequential):
    """Draws in each pass of a training."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(SIDE * SIDE, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def shuffled(data: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=2, shuffle=True)


def sampled(data: Dataset[Any]) -> DataLoader[Any]:
    """With replacement, by a sampler that draws from PyTorch's stream."""
    return DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 4))


def averaging(kind: type[Strategy], **settings: Any) -> Strategy:
    return kind(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, **settings)  # type: ignore[call-arg]


SGD, fedavg = partial(torch.optim.SGD, lr=0.1), partial(liars.fedavg, CLIENTS)


@dataclass(frozen=True)
class App:
    """Of clients and their server.

    Attributes:
        net: the model.
        optimizer: for its parameters.
        loader: of a client's images.
        epochs: of a round.
        strategy: made for each training.
        mods: around the clients.
        probed: clients answer probes.
        counting: clients keep the number of their rounds and train ever more slowly.
    """

    net: Callable[[], nn.Module] = Small
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    loader: Callable[[Dataset[Any]], DataLoader[Any]] = shuffled
    epochs: int = 1
    strategy: Callable[[], Strategy] = fedavg
    mods: tuple[Any, ...] = ()
    probed: bool = True
    counting: bool = False

    def clients(self, draw: Callable[[Augmented], float]) -> ClientApp:
        kept: dict[int, Augmented] = {}

        def data_of(context: Context) -> Augmented:
            client = int(context.node_config["partition-id"])
            return kept.setdefault(client, Augmented(client, draw))

        probe = [probe_mod(model=self.net, train=self._train, dataset=data_of)] if self.probed else []
        app = ClientApp(mods=[*self.mods, *probe])

        @app.train()
        def train_message(message: Message, context: Context) -> Message:
            net, data = self.net(), data_of(context)
            net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
            self._train(net, self.loader(data), rate=self._rate(context))
            metrics = MetricRecord({"num-examples": len(data)})
            return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

        return app

    def _rate(self, context: Context) -> float:
        if not self.counting:
            return 1.0
        rounds = int(context.state.config_records.get("mine", {"rounds": 0})["rounds"]) + 1  # type: ignore[arg-type]
        context.state["mine"] = ConfigRecord({"rounds": rounds})
        return 1 / rounds

    def _train(self, net: nn.Module, loader: DataLoader[Any], rate: float = 1.0) -> None:
        optimizer = self.optimizer(net.parameters())
        net.train()
        for _ in range(self.epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                (rate * F.cross_entropy(net(images), labels)).backward()
                optimizer.step()


def clipped() -> Strategy:
    return DifferentialPrivacyClientSideFixedClipping(liars.fedavg(CLIENTS), 0.1, 1.0, CLIENTS)


APPS = {
    "plain": App(),
    "Adam": App(optimizer=partial(torch.optim.Adam, lr=0.01)),
    "momentum over epochs": App(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9), epochs=2),
    "a sampler": App(loader=sampled),
    "dropout": App(net=Dropping),
    "batch norm": App(net=partial(Convolution, partial(nn.BatchNorm2d, 4))),
    "group norm under FedProx": App(
        net=partial(Convolution, partial(nn.GroupNorm, 2, 4)),
        strategy=partial(averaging, FedProx, proximal_mu=0.1),
    ),
    "FedAdam": App(strategy=partial(averaging, FedAdam)),
    "Sane(FedAvgM)": App(strategy=lambda: Sane(averaging(FedAvgM, server_momentum=0.9))),
    "differential privacy": App(strategy=clipped, mods=(fixedclipping_mod,)),
    "a defense": App(mods=(defense_mod(pruning(rate=0.5), model=Small),)),
    "a count and no probes": App(probed=False, counting=True),
}


def final(app: App, draw: Callable[[Augmented], float], seed: int, out: Path | None) -> tuple[dict[str, bytes], Tensor]:
    """Weights after the training from ``seed``, audited into ``out``, and what the stream gives next."""
    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(seed)
    clients, strategy = app.clients(draw), app.strategy()
    if out is not None:
        data = Augmented(0, draw)
        strategy = audit(strategy, model=app.net(), data=data, out=out, attack="analytic", victims=2, rounds="all")
        for seeded in (torch.manual_seed, np.random.seed, random.seed):
            seeded(seed)  # the model that the audit was given has drawn
    initial = ArrayRecord(app.net().state_dict())
    grid, config = LocalGrid(range(CLIENTS), clients), ConfigRecord({"lr": 0.1})
    result = strategy.start(grid, initial, num_rounds=ROUNDS, train_config=config)
    after = torch.tensor([float(torch.rand(())), np.random.rand(), random.random()])
    return as_bytes(result), after


def soon(place: int, kind: int, seed: int, app: str) -> bool:
    """Whether a case is not left to `make fuzz`: each app once, but for the one whose claims take many draws."""
    return (kind, seed) == (place % len(DRAWS), 0) and app != "differential privacy"


CASES = [
    pytest.param(app, stream, seed, marks=() if soon(place, kind, seed, app) else pytest.mark.fuzz)
    for place, app in enumerate(APPS)
    for kind, stream in enumerate(DRAWS)
    for seed in range(3)
]


@pytest.mark.parametrize(("app", "stream", "seed"), CASES)
def test_an_audited_app_comes_to_the_same_bytes(
    app: str, stream: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_privacy.auditing.strategy_report.DRAWS", 200)
    (plain, after), (audited, left) = (final(APPS[app], DRAWS[stream], seed, out) for out in (None, tmp_path))
    assert plain == audited
    assert torch.equal(after, left), "and what the app draws next"
    assert list(tmp_path.glob("audit-*")), "it was audited"


def test_there_are_as_many_as_are_said() -> None:
    assert len(APPS) == 12 and len(CASES) == 12 * len(DRAWS) * 3
