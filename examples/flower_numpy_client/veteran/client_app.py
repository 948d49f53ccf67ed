"""Clients as they were written before Flower's Message API; ``numpy_client_app`` answers messages with them."""

import os

import torch
import torch.nn.functional as F
from flwr.app import Context
from flwr.client import NumPyClient
from torch import nn
from torch.utils.data import DataLoader

from fl_privacy import defense_mod, probe_mod
from fl_privacy.data import load_data
from fl_privacy.defenses import pruning
from fl_privacy.flower import numpy_client_app

CLIENTS = 2
"""As many SuperNodes as Flower simulates unless told otherwise."""


def make_net() -> nn.Module:
    """Build the network: images in [0, 1] of 28x28 pixels in, 10 logits out."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(588, 10),
    )


def own_examples(client: int) -> list[tuple[torch.Tensor, int]]:
    """Load the training data of one client: 60 digits."""
    train = load_data("mnist_mini").train
    chosen = range(client, 60 * CLIENTS, CLIENTS)
    return [(train.images[k].float() / 255, int(train.labels[k])) for k in chosen]


def train(net: nn.Module, loader: DataLoader) -> None:
    """Train the network for one epoch."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


class FlowerClient(NumPyClient):
    """Lists of arrays in, lists of arrays out."""

    def __init__(self, client: int) -> None:
        self.net, self.examples = make_net(), own_examples(client)

    def fit(self, parameters, config):
        """Train."""
        self._load(parameters)
        train(self.net, DataLoader(self.examples, batch_size=20, shuffle=True))
        return [value.numpy() for value in self.net.state_dict().values()], len(self.examples), {}

    def evaluate(self, parameters, config):
        """Compute loss and accuracy on the training data."""
        self._load(parameters)
        images, labels = (torch.stack([torch.as_tensor(e[k]) for e in self.examples]) for k in (0, 1))
        with torch.no_grad():
            logits = self.net(images)
        accuracy = (logits.argmax(1) == labels).float().mean().item()
        return F.cross_entropy(logits, labels).item(), len(labels), {"accuracy": accuracy}

    def _load(self, parameters) -> None:
        names = self.net.state_dict()
        self.net.load_state_dict({name: torch.tensor(value) for name, value in zip(names, parameters, strict=True)})


def client_fn(context: Context) -> NumPyClient:
    """Create the client of a node."""
    return FlowerClient(int(context.node_config["partition-id"]))


probe = probe_mod(
    model=make_net, train=train, dataset=lambda context: own_examples(int(context.node_config["partition-id"]))
)
defense = defense_mod(pruning(rate=0.99), model=make_net)

app = numpy_client_app(client_fn, mods=[defense, probe] if os.environ.get("VETERAN_DEFENDED") else [probe])
