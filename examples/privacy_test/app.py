"""An app as there are many: a network, a training function, and a setting that decides how much it leaks."""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_privacy.data import load_data

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
"""Examples behind each update."""


class Net(nn.Sequential):
    """Digits in, ten logits out."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 12, 5, stride=2, padding=2),
            nn.Sigmoid(),
            nn.Conv2d(12, 12, 5, stride=2, padding=2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(588, 10),
        )


def digits() -> list[tuple[Tensor, int]]:
    """Load the client's examples."""
    train = load_data("mnist_mini").train
    return [(train.images[k].float() / 255, int(train.labels[k])) for k in range(0, len(train), 50)]


def train(model: nn.Module, loader: DataLoader) -> None:
    """Train the model for one epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
