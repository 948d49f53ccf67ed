"""Model, data and training, as in any PyTorch project; nothing here knows of fl_privacy's audits."""

import os
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Normalize

from fl_privacy.data import load_data as load_images

DATA = os.environ.get("QUICKSTART_DATA", "cifar10")
"""A data set that fl_privacy loads; ``mnist_mini`` needs no download."""

CHANNELS = 1 if "mnist" in DATA else 3
NORMALIZE = Normalize((0.5,) * CHANNELS, (0.5,) * CHANNELS)


class Net(nn.Module):
    """Two convolutions with batch norm, two fully connected layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, 16, 5, stride=2, padding=2)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 5, stride=2, padding=2)
        self.norm2 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 8 * 8, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.elu(self.norm1(self.conv1(x)))
        x = F.elu(self.norm2(self.conv2(x)))
        return self.fc2(F.elu(self.fc1(x.flatten(1))))


class Pictures(Dataset[tuple[Tensor, int]]):
    """Every ``step``-th image of the data set from ``start``, normalized."""

    def __init__(self, split: str, start: int, step: int, most: int) -> None:
        examples = getattr(_images(), split)
        self.images, self.labels = examples.images[start::step][:most], examples.labels[start::step][:most]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return NORMALIZE(self.images[index].float() / 255), int(self.labels[index])


@cache
def _images():
    return load_images(DATA, image_size=32)


def load_data(partition: int, partitions: int, batch_size: int = 32) -> tuple[DataLoader, DataLoader]:
    """Load the training and test data of one client: 160 and 40 images."""
    trainset = Pictures("train", partition, partitions, 160)
    testset = Pictures("test", partition, partitions, 40)
    return DataLoader(trainset, batch_size=batch_size, shuffle=True), DataLoader(testset, batch_size=batch_size)


def train(net: nn.Module, trainloader: DataLoader, epochs: int, lr: float, device: str = "cpu") -> float:
    """Train in place; returns the mean loss."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total, steps = 0.0, 0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
    return total / steps


@torch.no_grad()
def test(net: nn.Module, testloader: DataLoader, device: str = "cpu") -> tuple[float, float]:
    """Compute loss and accuracy on the test data."""
    net.to(device).eval()
    loss, right, number = 0.0, 0, 0
    for images, labels in testloader:
        logits = net(images.to(device))
        loss += F.cross_entropy(logits, labels.to(device), reduction="sum").item()
        right += int((logits.argmax(1).cpu() == labels).sum())
        number += len(labels)
    return loss / number, right / number
