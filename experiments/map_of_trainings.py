"""Say what ``attack=auto`` reconstructs behind twelve networks, by batch norm, batch, steps, untrained or trained.

    python experiments/map_of_trainings.py DATA --out experiments/rows/map_of_trainings --minutes 5
    python experiments/map_of_trainings.py DATA --out experiments/rows/map_of_trainings --minutes 4000 --victims 4

DATA holds CIFAR-10's test images (``cifar10_exact``). The cheapest cells come first; cells with a row are not computed
again, so that a stopped run goes on. A row says how many images are identified among 1,000, and the same of the
reconstruction of another client's update, as a control. Trained networks have seen ``--images`` others for
one epoch of Adam. Each row also has what ``fl-privacy predict`` says of the network beforehand.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torchvision
from row_file import RowFile, takes_rows
from torch import Tensor, nn
from trained_resnet import compared

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks.prediction import PlannedTraining, predict
from fl_privacy.data import load_data
from fl_privacy.measure.identification import PublicImages
from fl_privacy.models import MLP, VGG16, LeNet, ResNet18, ResNet20, ViT
from fl_privacy.types import LocalPlan

SHAPE, CLASSES, CANDIDATES, RATE = (3, 32, 32), 10, 1000, 0.01
NORMALIZED: dict[str, Any] = {"mean": [0.5], "std": [0.25]}
FACTS: dict[str, Any] = {"in_channels": 3, "image_size": 32, "num_classes": CLASSES}
PUBLISHED: dict[str, Any] = {"init": "kaiming_normal_fan_out", **NORMALIZED, **FACTS}


def quickstart() -> nn.Module:
    """Build the network of Flower's quickstart."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: MLP(widths=[256, 128], **NORMALIZED, **FACTS),
    "LeNet": lambda: LeNet(activation="tanh", **NORMALIZED, **FACTS),
    "quickstart's Net": quickstart,
    "ViT, 6 blocks": lambda: ViT(**NORMALIZED, **FACTS),
    "ResNet-20": lambda: ResNet20(width=16, **PUBLISHED),
    "ResNet-18, group norm": lambda: ResNet18(width=16, norm="group", **PUBLISHED),
    "ResNet-18": lambda: ResNet18(width=64, **PUBLISHED),
    "VGG-16": lambda: VGG16(width=16, norm="batch", init="kaiming_uniform", **NORMALIZED, **FACTS),
    "MobileNetV3": lambda: torchvision.models.mobilenet_v3_small(num_classes=CLASSES),
    "EfficientNet-B0": lambda: torchvision.models.efficientnet_b0(num_classes=CLASSES),
    "ConvNeXt-tiny": lambda: torchvision.models.convnext_tiny(num_classes=CLASSES),
    "DenseNet-121": lambda: torchvision.models.densenet121(num_classes=CLASSES),
}
"""Twelve networks, those with the cheapest gradients first."""
BUILT_ON = ("MLP", "LeNet", "quickstart's Net", "ResNet-20")
"""Networks whose rows the rules of the prediction were built on."""
BATCHES, STEPS = (1, 2, 4, 8, 32), (1, 5, 20)


def cells() -> Iterator[dict[str, Any]]:
    """Yield the cells: few steps, small batches, fixed statistics and untrained networks first."""
    for steps in STEPS:
        for trained in (False, True):
            for batch in BATCHES:
                for mode in ("eval", "train"):
                    for name, build in NETWORKS.items():
                        normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in build().modules())
                        if mode == "eval" or normed:
                            yield {"network": name, "mode": mode, "batch": batch, "steps": steps, "trained": trained}


def network(cell: dict[str, Any], others: tuple[Tensor, Tensor]) -> nn.Module:
    """Build the network of a cell, trained on other images if asked for."""
    torch.manual_seed(0)
    model = NETWORKS[cell["network"]]()
    if cell["trained"]:
        optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-3)
        for some in torch.randperm(len(others[0])).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(others[0][some]), others[1][some]).backward()
            optimizer.step()
    return model.eval()


def observed(cell: dict[str, Any], model: nn.Module, images: Tensor, labels: Tensor, number: int) -> Observation:
    """Observe the update of a client that trains ``steps`` steps on one batch."""
    mode = cast(Literal["eval", "train"], cell["mode"])
    plan = LocalPlan(shares="delta", lr=RATE, epochs=cell["steps"], batch_size=len(images), batch_norm=mode, mode=mode)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.train(mode == "train").parameters(), lr=RATE)
    for _ in range(cell["steps"]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    return Observation.of_update(
        model.eval(), after, plan, input_shape=SHAPE, num_examples=len(images), loss="cross_entropy", number=number
    )


def measured(cell: dict[str, Any], candidates: PublicImages, victims: int, trained_on: int) -> dict[str, Any]:
    """Attack some victims of a cell, and say what was predicted."""
    images, labels = candidates.images, candidates.labels
    assert labels is not None
    others = images[-trained_on:], labels[-trained_on:]
    model, size = network(cell, others), cell["batch"]
    found = predict(model, SHAPE, PlannedTraining(size, cell["mode"], cell["steps"]))
    places = [slice(v * size, (v + 1) * size) for v in range(victims)]
    seen = [observed(cell, model, images[place], labels[place], v) for v, place in enumerate(places)]
    began, used = time.perf_counter(), time.process_time()
    guesses = reconstruct(seen, "auto", budget="quick")
    times = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
    figures = []
    for number, (place, one) in enumerate(zip(places, guesses, strict=True)):
        guess = torch.zeros_like(images[place]) if one.batch is None else one.batch.inputs
        figures.append(compared(guess, images[place], images[places[number - 1]], candidates))
    row = {name: sum(each[name] for each in figures) for name in ("identified", "of", "control_identified")}
    return {
        **row,
        "victims": victims,
        "psnr": sum(each["psnr"] for each in figures) / victims,
        "control_psnr": sum(each["control_psnr"] for each in figures) / victims,
        "members": sorted({one.member or one.failure or "none" for one in guesses}),
        **{name: round(value / victims, 1) for name, value in times.items()},
        "predicted": found.outcome,
        "layer": found.layer,
        "held_out": cell["network"] not in BUILT_ON,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--minutes", type=float, default=5, help="of CPU time, after which no cell is begun")
    parser.add_argument("--victims", type=int, default=2)
    parser.add_argument("--images", type=int, default=500, help="that trained networks have seen")
    parser.add_argument("--only", default="", help="cells of this network")
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    test = load_data("cifar10_exact", root=str(options.data)).test.batch(torch.arange(CANDIDATES))
    candidates = PublicImages(images=test.inputs, labels=test.labels, name="test images")
    kept = RowFile(options.out)
    for cell in cells():
        if time.process_time() > 60 * options.minutes:
            return
        if kept.find(cell) is None and options.only in ("", cell["network"]):
            print(kept.add(cell, measured(cell, candidates, options.victims, options.images)), flush=True)


if __name__ == "__main__":
    main()
