"""Network, data and training, as in any PyTorch project."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy.data import load_data as load_images


class Net(nn.Module):
    """Two convolutions and two fully connected layers, for images of 28 x 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, stride=2, padding=2)
        self.fc1 = nn.Linear(32 * 7 * 7, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


@cache
def _digits():
    return load_images("mnist_mini", image_size=28)


def load_data(partition: int, partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Load a node's training and test data: every image numbered ``partition`` modulo ``partitions``."""
    loaders = []
    for split in (_digits().train, _digits().test):
        images = (split.images[partition::partitions].float() / 255 - 0.5) / 0.5
        own = TensorDataset(images, split.labels[partition::partitions].long())
        loaders.append(DataLoader(own, batch_size=batch_size, shuffle=split is _digits().train))
    return loaders[0], loaders[1]


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train in place; return the mean loss."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=lr), []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy."""
    right = sum(int((net(images).argmax(1) == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)
