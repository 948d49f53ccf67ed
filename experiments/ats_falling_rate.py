"""Accuracy in the course of a training whose learning rate falls, with defenses of each step's gradient (ATS, Table 4).

    python experiments/ats_falling_rate.py DATA --out experiments/rows/ats_falling_rate
    python experiments/ats_falling_rate.py DATA --network lenet --set cifar10 --out experiments/rows/ats_falling_rate
    python experiments/ats_falling_rate.py DATA --network resnet20 --width 8 --out experiments/rows/ats_falling_rate

As the authors' program trains: batches of 128, SGD with Nesterov's momentum, the rate a tenth after 3/8, 5/8 and 7/8 of
the epochs, images shifted and mirrored, Gaussian noise added to the gradient of each step or the smallest elements of
each of its tensors set to zero. A row of a line has the accuracy on the test split at the end of each rate. DATA holds
the folders of the image sets. Rows that are there are kept.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from ats_trained_weights import network_of
from row_file import Row, RowFile, takes_rows
from torch import Tensor, nn
from torch.nn import functional
from trained_resnet import MEAN, STD

from fl_privacy.data import Dataset, Examples, load_data
from fl_privacy.models import ResNet20
from fl_privacy.rng import derive_generator

LINES = ("standard", "noise 1e-2", "noise 1e-3", "pruning 0.99", "pruning 0.95", "pruning 0.7")
BATCH, TESTED_AT_ONCE = 128, 500


def built(options: argparse.Namespace) -> nn.Module:
    """Build the network with its initial values."""
    if options.network != "resnet20":
        return network_of(options)
    torch.manual_seed(0)
    return ResNet20(in_channels=3, image_size=32, num_classes=10, width=options.width, mean=MEAN, std=STD)


def drops(epochs: int) -> list[int]:
    """Return the epochs after which the rate falls, as the authors' program rounds them."""
    return [int(epochs // share) for share in (2.667, 1.6, 1.142)]


def varied(images: Tensor, draws: torch.Generator) -> Tensor:
    """Shift each image by up to four pixels, black entering, and mirror half of them."""
    count, _, height, width = images.shape
    padded = functional.pad(images, (4, 4, 4, 4))
    down, right = torch.randint(0, 9, (2, count, 1), generator=draws)
    across = right + torch.arange(width)
    mirrored = torch.rand(count, 1, generator=draws) < 0.5
    across = torch.where(mirrored, across.flip(1), across)
    places = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[places, (down + torch.arange(height))[:, :, None], across[:, None]].permute(
        0, 3, 1, 2
    )


def defend(model: nn.Module, line: str, draws: torch.Generator) -> None:
    """Add the line's noise to the gradients, or zero the smallest elements of each tensor."""
    kind, _, strength = line.partition(" ")
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        if kind == "noise":
            gradient += float(strength) * torch.randn(gradient.shape, generator=draws)
        elif kind == "pruning" and (least := int(gradient.numel() * float(strength))):
            gradient.view(-1)[gradient.abs().flatten().topk(least, largest=False).indices] = 0.0


@torch.no_grad()
def accuracy(model: nn.Module, test: Examples) -> float:
    """Compute the accuracy on the test split."""
    model.eval()
    right = 0
    for places in torch.arange(len(test)).split(TESTED_AT_ONCE):
        batch = test.batch(places)
        right += int((model(batch.inputs).argmax(1) == batch.labels).sum())
    model.train()
    return right / len(test)


def course(model: nn.Module, data: Dataset, *, line: str, epochs: int, rate: float) -> Iterator[float]:
    """Train ``model`` in place under the line's defense; yield each learning rate once it has been used."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for epoch in range(1, epochs + 1):
        draws = derive_generator(0, "experiment", "epoch", str(epoch))
        model.train()
        for places in torch.randperm(len(data.train), generator=draws).split(BATCH):
            batch = data.train.batch(places)
            optimizer.zero_grad()
            functional.cross_entropy(model(varied(batch.inputs, draws)), batch.labels).backward()
            defend(model, line, draws)
            optimizer.step()
        if epoch in (*drops(epochs), epochs):
            yield rate
            rate = optimizer.param_groups[0]["lr"] = rate / 10


def trained(line: str, options: argparse.Namespace) -> Row:
    """Train a network under the line's defense; return the accuracy at the end of each rate."""
    data, model, found = load_data(options.set, root=str(options.data)), built(options), Row()
    for rate in course(model, data, line=line, epochs=options.epochs, rate=options.rate):
        found["accuracy"] = found[f"at_{rate:.0e}"] = accuracy(model, data.test)
        print(line, f"{rate:.0e}", found["accuracy"], flush=True)
    size = sum(parameter.numel() for parameter in model.parameters())
    return found | {"tested": len(data.test), "parameters": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    networks = ("untrained", "resnet20", "lenet")
    parser.add_argument("--network", choices=networks, default="untrained", help="He et al.'s ResNet-20 unless given")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage of resnet20")
    parser.add_argument("--set", choices=("cifar10", "cifar10_exact"), default="cifar10_exact")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--lines", nargs="+", default=list(LINES))
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    names = ("network", "set", "epochs", "rate", *(("width",) if options.network == "resnet20" else ()))
    for line in options.lines:
        key: Row = {"line": line, **{name: getattr(options, name) for name in names}}
        if kept.find(key) is None:
            print(kept.add(key, trained(line, options)), flush=True)


if __name__ == "__main__":
    main()
