"""A Flower app that knows nothing of this package: Message API, batch norm, normalized images."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_privacy.flower import LocalGrid

CLIENTS, EACH = 2, 6
SHAPE, CLASSES = (1, 8, 8), 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sigmoid(self.norm(self.conv(x))).flatten(1))


def pictures(client: int) -> list[tuple[Tensor, int]]:
    """Smooth images with black and white in them, normalized to [-1, 1]."""
    coarse = torch.rand((EACH, 1, 3, 3), generator=torch.Generator().manual_seed(client))
    smooth = F.interpolate(coarse, SHAPE[1:], mode="bilinear", align_corners=True)
    low, high = (pick(smooth, dim=(1, 2, 3), keepdim=True) for pick in (torch.amin, torch.amax))
    levels = ((smooth - low) / (high - low) * 255).round() / 255
    return [((image - 0.5) / 0.5, k % CLASSES) for k, image in enumerate(levels)]


def train(net: nn.Module, loader: DataLoader, config: Any) -> None:
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=float(config["lr"]), momentum=0.9)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


def own_pictures(context: Context) -> list[tuple[Tensor, int]]:
    return pictures(int(context.node_config["partition-id"]))


def client_app(mods: Sequence[Any] = (), *, batch_size: int = EACH) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train_message(message: Message, context: Context) -> Message:
        net, data = Net(), own_pictures(context)
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        train(net, DataLoader(data, batch_size=batch_size), message.content.config_records["config"])
        metrics = MetricRecord({"num-examples": len(data), "train_loss": 1.0})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)


def initial() -> ArrayRecord:
    torch.manual_seed(0)
    return ArrayRecord(Net().state_dict())


def start(
    strategy: Strategy, app: ClientApp | None = None, *, rounds: int = 1, clients: int = CLIENTS, lr: float = 0.1
) -> Result:
    grid = LocalGrid(range(clients), app or client_app())
    return strategy.start(grid, initial(), num_rounds=rounds, train_config=ConfigRecord({"lr": lr}))
