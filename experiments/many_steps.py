"""What is reconstructed of clients that train for many steps: images, batches, epochs, momentum and Adam, a rung each.

    python experiments/many_steps.py DATA --out experiments/rows/many_steps --minutes 60
    python experiments/many_steps.py DATA --out experiments/rows/many_steps --only adam

DATA holds `cifar10_exact/test.parquet`. Clients hold different test images and train the network of Flower's
quickstart, or a LeNet, by PyTorch's own optimizers, their batches shuffled anew in each epoch by a stream that no
attack sees. Each update is attacked by `attack=sme` with the settings of its public configuration (1,000 iterations, a
from 1/2, total variation 0.01), by the same held to the model sent (what a gradient inversion does to first order), and
by `attack=auto`. A row says how near the reconstructions are, which images are identified among 1,000, and the same of
another client's images, as a control. Rows that are there are not computed again.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from row_file import RowFile, takes_rows
from torch import Tensor, nn
from trained_resnet import CANDIDATES, compared, mean

from fl_privacy import LocalPlan, Observation, reconstruct
from fl_privacy.data import load_data
from fl_privacy.measure.identification import PublicImages
from fl_privacy.models import LeNet


@dataclass(frozen=True)
class Rung:
    """How the clients of a rung train.

    Attributes:
        network: ``quickstart`` or ``lenet``.
        images: of a client.
        batch: images of a step.
        epochs: passes over them.
        optimizer: ``sgd``, ``momentum`` (0.9) or ``adam``.
        lr: its learning rate.
    """

    network: str
    images: int
    batch: int
    epochs: int
    optimizer: str = "sgd"
    lr: float = 0.004


RUNGS = (
    Rung("lenet", 1, 1, 1, "adam", 0.001),
    Rung("quickstart", 1, 1, 1, "adam", 0.001),
    Rung("quickstart", 1, 1, 1),
    Rung("quickstart", 1, 1, 20),
    Rung("quickstart", 8, 4, 1),
    Rung("quickstart", 8, 4, 5),
    Rung("quickstart", 8, 4, 5, "momentum"),
    Rung("quickstart", 8, 4, 5, "adam", 0.001),
    Rung("quickstart", 8, 1, 20),
    Rung("quickstart", 50, 10, 20),
    Rung("lenet", 1, 1, 20),
    Rung("lenet", 1, 1, 20, "momentum"),
    Rung("lenet", 1, 1, 5, "adam", 0.001),
    Rung("lenet", 8, 4, 5),
    Rung("lenet", 8, 4, 5, "adam", 0.001),
    Rung("lenet", 50, 10, 20),
)

ATTACKS = {
    "sme": ("sme", {}),
    "first order": ("sme", {"between": 0.0, "between_lr": 0.0}),
    "auto quick": ("auto", {"budget": "quick"}),
}


def network(name: str) -> nn.Module:
    """Build a network with PyTorch's initial values."""
    torch.manual_seed(0)
    if name == "lenet":
        return LeNet(in_channels=3, image_size=32, num_classes=10)
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def plan_of(rung: Rung) -> LocalPlan:
    """Return the plan as the server knows it."""
    momentum = 0.9 if rung.optimizer == "momentum" else 0.0
    optimizer = "adam" if rung.optimizer == "adam" else "sgd"
    return LocalPlan(
        shares="delta",
        lr=rung.lr,
        optimizer=optimizer,  # type: ignore[arg-type]
        momentum=momentum,
        epochs=rung.epochs,
        batch_size=rung.batch,
    )


def trained(rung: Rung, images: Tensor, labels: Tensor, rng: torch.Generator) -> nn.Module:
    """Train a client's copy of the network, in an order that ``rng`` draws."""
    model = network(rung.network)
    if rung.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=rung.lr)
    else:
        momentum = 0.9 if rung.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=rung.lr, momentum=momentum)
    for _ in range(rung.epochs):
        for batch in torch.randperm(len(images), generator=rng).split(rung.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def attacked(rung: Rung, attack: str, clients: int, candidates: PublicImages) -> dict[str, object]:
    """Attack the update of each client, and judge what was found."""
    places = [slice(c * rung.images, (c + 1) * rung.images) for c in range(clients)]
    images, labels = candidates.images, candidates.labels
    assert labels is not None
    sent, seen = network(rung.network), []
    for number, place in enumerate(places):
        after = trained(rung, images[place], labels[place], torch.Generator().manual_seed(number))
        seen.append(
            Observation.of_update(
                sent,
                after.state_dict(),
                plan_of(rung),
                input_shape=(3, 32, 32),
                num_examples=rung.images,
                loss="cross_entropy",
                number=number,
            )
        )
    name, options = ATTACKS[attack]
    began, used = time.perf_counter(), time.process_time()
    found = reconstruct(seen, name, **options)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    figures = []
    for place, one in zip(places, found, strict=True):
        guesses = torch.zeros_like(images[place]) if one.batch is None else one.batch.inputs
        foreign = images[500 + place.start : 500 + place.stop]
        figures.append(compared(guesses, images[place], foreign, candidates))
    return {
        "steps": rung.epochs * -(-rung.images // rung.batch),
        "clients": clients,
        "members": sorted({one.member or one.failure or attack for one in found}),
        **summed(figures),
        "cpu_seconds": round(used / clients, 1),
        "seconds": round(seconds / clients, 1),
    }


def summed(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Add up counts over clients, and average the rest."""
    counts = ("identified", "of", "control_identified")
    return {
        name: int(sum(one[name] for one in figures)) if name in counts else round(mean(o[name] for o in figures), 2)
        for name in figures[0]
        if name != "worst_rank"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--version", choices=("before", "after"), default="after", help="before: an older package")
    parser.add_argument("--only", default="", help="rungs of which one value is this")
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    test = load_data("cifar10_exact", root=str(options.data)).test.batch(torch.arange(CANDIDATES))
    candidates = PublicImages(images=test.inputs, labels=test.labels, name="test images")
    kept, end = RowFile(options.out), time.monotonic() + 60 * options.minutes
    for rung in RUNGS:
        clients = {1: 4, 8: 2}.get(rung.images, 1)
        for attack in ATTACKS:
            key = {**asdict(rung), "attack": attack, "version": options.version}
            single = rung.images == rung.batch and rung.epochs == 1  # has no way between models
            if (single or options.version == "before") and not attack.startswith("auto"):
                continue
            if kept.find(key) is not None or (options.only and options.only not in map(str, key.values())):
                continue
            if time.monotonic() > end:
                return
            print(kept.add(key, attacked(rung, attack, clients, candidates)), flush=True)


if __name__ == "__main__":
    main()
