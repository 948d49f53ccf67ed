"""Say what ``attack=auto`` reconstructs behind many networks, by batch norm, batch, steps, untrained or trained.

    python experiments/map_of_trainings.py DATA --predict first --out experiments/rows/predicted_before
    python experiments/map_of_trainings.py DATA --only first --out experiments/rows/map_of_trainings --minutes 60
    python experiments/map_of_trainings.py DATA --out experiments/rows/map_of_trainings --minutes 4000 --victims 4

DATA holds CIFAR-10's test images (``cifar10_exact``). The cheapest cells come first; cells with a row are not computed
again, so that a stopped run goes on. A row says how many images are identified among 1,000, and the same of the
reconstruction of another client's update, as a control. Trained networks have seen ``--images`` others for
one epoch of Adam. The first command keeps what ``fl-privacy predict`` says of networks that no rule was built on,
before the second attacks them: ``HELD_OUT`` lists them for each version of the rules, and ``KINDS`` their trainings.
Those that are decided come first.
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
from torchvision.models.convnext import CNBlockConfig
from trained_resnet import compared

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks.auto import Budget
from fl_privacy.attacks.prediction import PlannedTraining, predict
from fl_privacy.data import load_data
from fl_privacy.measure.identification import PublicImages
from fl_privacy.models import MLP, VGG16, LeNet, ResNet18, ResNet20, ViT
from fl_privacy.types import LocalPlan

_SMALL = 2  # images of an update, up to which several victims are attacked
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


def convolved(*widths: int | str, norm: bool = False, inner: int = 3, kind: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Build 3x3 convolutions of ``widths``, pooled at each "M", halved by stride at each "S", and a linear layer."""
    layers, stride = list[nn.Module](), 1
    for width in widths:
        if width == "M":
            layers.append(nn.MaxPool2d(2))
        elif isinstance(width, int):
            layers.append(nn.Conv2d(inner, width, 3, stride, padding=1))
            layers += [nn.GroupNorm(8, width)] * norm + [kind()]
            inner, stride = width, 1
        else:
            stride = 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, CLASSES))


class PreactivationBlock(nn.Module):
    """Norm and ReLU in front of two convolutions, with a shortcut (He et al. 2016b)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *(nn.BatchNorm2d(inner), nn.ReLU(), nn.Conv2d(inner, outer, 3, stride, 1, bias=False)),
            *(nn.BatchNorm2d(outer), nn.ReLU(), nn.Conv2d(outer, outer, 3, 1, 1, bias=False)),
        )
        self.shortcut = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, inner, H, W) -> (B, outer, H / stride, W / stride)."""
        outputs: Tensor = self.shortcut(inputs) + self.residual(inputs)
        return outputs


def preactivated(widths: tuple[int, ...], blocks: int) -> nn.Module:
    """Build a pre-activation ResNet, or a wide one, with ``blocks`` a stage."""
    layers, inner = [nn.Conv2d(3, 16, 3, padding=1, bias=False)], 16
    stages = list[nn.Module](layers)
    for number, width in enumerate(widths):
        for block in range(blocks):
            stages.append(PreactivationBlock(inner, width, 2 if number and not block else 1))
            inner = width
    end = (nn.BatchNorm2d(inner), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, CLASSES))
    return nn.Sequential(*stages, *end)


class MixerBlock(nn.Module):
    """Linear layers along the patches, then along the channels (Tolstikhin et al. 2021)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.along = nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches))
        self.across = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, patches, width) to the same shape."""
        tokens = tokens + self.along(self.norms[0](tokens).mT).mT
        outputs: Tensor = tokens + self.across(self.norms[1](tokens))
        return outputs


class Mixer(nn.Module):
    """MLP-Mixer on patches of 4x4 pixels."""

    def __init__(self, width: int = 96, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(64, width) for _ in range(depth)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, 32, 32) to logits (B, 10)."""
        logits: Tensor = self.head(self.blocks(self.patches(images).flatten(2).mT).mean(1))
        return logits


def convnext() -> nn.Module:
    """Build a ConvNeXt of six blocks."""
    stages = [CNBlockConfig(40, 80, 2), CNBlockConfig(80, 160, 2), CNBlockConfig(160, None, 2)]
    return torchvision.models.ConvNeXt(stages, num_classes=CLASSES)


def of_fedavg() -> nn.Module:
    """Build the convolutional network of FedAvg (McMahan et al. 2017), for three channels."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
    )


def lenet_5() -> nn.Module:
    """Build LeNet-5 with sigmoids and average pools."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Sigmoid(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.Sigmoid(), nn.Linear(120, 84), nn.Sigmoid(), nn.Linear(84, CLASSES)),
    )


class RowsOfPixels(nn.Module):
    """LSTM over the rows of an image, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(96, 64, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, 32, 32) to logits (B, 10)."""
        states, _ = self.rows(images.transpose(1, 2).flatten(2))
        logits: Tensor = self.head(states[:, -1])
        return logits


def normed(*widths: int) -> nn.Module:
    """Build 3x3 convolutions of ``widths``, each with batch norm, ReLU and a pool, and two linear layers."""
    layers, inner = list[nn.Module](), 3
    for width in widths:
        layers += [nn.Conv2d(inner, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        inner = width
    size = inner * (32 // 2 ** len(widths)) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def alexnet() -> nn.Module:
    """Build AlexNet for images of 32 x 32 pixels, without dropout."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 192, 3, 1, 1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(192, 128, 3, 1, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 1, 1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
    )


def strided(kind: type[nn.Module], *widths: int) -> nn.Module:
    """Build 5x5 convolutions of ``widths``, each with stride 2 and an activation, and a linear layer."""
    layers, inner = list[nn.Module](), 3
    for width in widths:
        layers += [nn.Conv2d(inner, width, 5, 2, 2), kind()]
        inner = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inner * (32 // 2 ** len(widths)) ** 2, CLASSES))


def of_mnist() -> nn.Module:
    """Build the network of PyTorch's MNIST example, for three channels of 32 x 32 pixels, without dropout."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    )


def of_keras() -> nn.Module:
    """Build the network of TensorFlow's tutorial on images of CIFAR-10."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    )


def swin() -> nn.Module:
    """Build a Swin Transformer of two stages on patches of 2 x 2 pixels."""
    return torchvision.models.SwinTransformer([2, 2], 32, [2, 2], [2, 4], [4, 4], num_classes=CLASSES)


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
    "logistic regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, CLASSES)),
    "MLP, tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.Tanh(), nn.Linear(64, CLASSES)),
    "LeNet-5, sigmoid": lenet_5,
    "FedAvg's CNN": of_fedavg,
    "MLP-Mixer, 3 blocks": Mixer,
    "VGG-11, group norm": lambda: convolved(*VGG_11, norm=True),
    "wide ResNet-10": lambda: preactivated((32, 64, 128), 1),
    "pre-activation ResNet-14": lambda: preactivated((16, 32, 64), 2),
    "ConvNeXt, 6 blocks": convnext,
    "SqueezeNet": lambda: torchvision.models.squeezenet1_1(num_classes=CLASSES),
    "ShuffleNetV2": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=CLASSES),
    "MLP of four layers, GELU": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(3072, 200), nn.GELU(), nn.Linear(200, 100), nn.GELU()),
        *(nn.Linear(100, 50), nn.GELU(), nn.Linear(50, CLASSES)),
    ),
    "CNN, leaky ReLU": lambda: convolved(16, "S", 32, "S", 64, kind=nn.LeakyReLU),
    "CNN, batch norm": lambda: normed(32, 64),
    "AlexNet": alexnet,
    "LSTM over rows": RowsOfPixels,
    "Swin, 4 blocks": swin,
    "ResNet-18, torchvision": lambda: torchvision.models.resnet18(num_classes=CLASSES),
    "MobileNetV2": lambda: torchvision.models.mobilenet_v2(num_classes=CLASSES),
    "RegNetY-400MF": lambda: torchvision.models.regnet_y_400mf(num_classes=CLASSES),
    "CNN, one layer": lambda: nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3600, CLASSES)),
    ),
    "CNN, two strides": lambda: strided(nn.ReLU, 8, 16),
    "CNN, three strides, tanh": lambda: strided(nn.Tanh, 12, 24, 48),
    "CNN, two strides, ELU": lambda: strided(nn.ELU, 12, 24),
    "MNIST example's CNN": of_mnist,
    "TensorFlow tutorial's CNN": of_keras,
    "MLP, ReLU, two layers": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    ),
    "ResNet-34, torchvision": lambda: torchvision.models.resnet34(num_classes=CLASSES),
    "MobileNetV3-large": lambda: torchvision.models.mobilenet_v3_large(num_classes=CLASSES),
    "EfficientNet-B1": lambda: torchvision.models.efficientnet_b1(num_classes=CLASSES),
}
"""Networks, those with the cheapest gradients first."""
VGG_11 = (16, "M", 32, "M", 64, 64, "M", 128, 128, "M", 128, 128)
HELD_OUT = {
    "first": (
        *("logistic regression", "MLP, tanh", "LeNet-5, sigmoid", "FedAvg's CNN", "MLP-Mixer, 3 blocks"),
        *("VGG-11, group norm", "wide ResNet-10", "pre-activation ResNet-14", "ConvNeXt, 6 blocks"),
        *("MobileNetV3", "EfficientNet-B0"),
    ),
    "second": ("SqueezeNet", "ShuffleNetV2"),
    "third": (
        *("MLP of four layers, GELU", "CNN, leaky ReLU", "CNN, batch norm", "AlexNet", "LSTM over rows"),
        *("Swin, 4 blocks", "ResNet-18, torchvision", "MobileNetV2", "RegNetY-400MF"),
    ),
    "fourth": (
        *("CNN, one layer", "CNN, two strides", "CNN, three strides, tanh", "CNN, two strides, ELU"),
        *("MNIST example's CNN", "TensorFlow tutorial's CNN", "MLP, ReLU, two layers"),
        *("ResNet-34, torchvision", "MobileNetV3-large", "EfficientNet-B1"),
    ),
}
"""Networks by the version of the rules that they are held out of: chosen, and predicted, before they were attacked."""
KINDS = (
    *((1, "eval", 1, False), (1, "eval", 1, True), (2, "eval", 1, False), (4, "eval", 1, True)),
    *((8, "eval", 1, False), (1, "eval", 5, False), (1, "train", 1, False), (2, "train", 1, True)),
)
"""Trainings of the networks held out: batch, mode, steps, trained."""
PREDICTED = Path(__file__).parent / "rows" / "predicted_before"
CELL = ("network", "mode", "batch", "steps", "trained")
BATCHES, STEPS = (1, 2, 4, 8, 32), (1, 5, 20)


def is_normed(name: str) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in NETWORKS[name]().modules())


def held_out(version: str) -> Iterator[dict[str, Any]]:
    """Yield the cells of networks held out of a version of the rules."""
    for batch, mode, steps, trained in KINDS:
        for name in HELD_OUT[version]:
            if mode == "eval" or is_normed(name):
                yield {"network": name, "mode": mode, "batch": batch, "steps": steps, "trained": trained}


def cells() -> Iterator[dict[str, Any]]:
    """Yield the cells: few steps, small batches, fixed statistics and untrained networks first.

    Networks that only check later versions of the rules are left to ``held_out``.
    """
    for steps in STEPS:
        for trained in (False, True):
            for batch in BATCHES:
                for mode in ("eval", "train"):
                    for name in NETWORKS:
                        if name not in HELD_OUT["third"] + HELD_OUT["fourth"] and (mode == "eval" or is_normed(name)):
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


def predicted(cell: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    began = time.process_time()
    found = predict(model, SHAPE, PlannedTraining(cell["batch"], cell["mode"], cell["steps"]))
    seconds = round(time.process_time() - began, 2)
    return {"predicted": found.outcome, "layer": found.layer, "reason": found.reason, "cpu_seconds": seconds}


def measured(
    cell: dict[str, Any], model: nn.Module, candidates: PublicImages, victims: int, budget: Budget
) -> dict[str, Any]:
    """Attack some victims of a cell; the control compares with the images of the next client."""
    images, labels, size = candidates.images, candidates.labels, cell["batch"]
    assert labels is not None
    places = [slice(v * size, (v + 1) * size) for v in range(victims + 1)]
    seen = [observed(cell, model, images[place], labels[place], v) for v, place in enumerate(places[:-1])]
    began, used = time.perf_counter(), time.process_time()
    guesses = reconstruct(seen, "auto", budget=budget)
    times = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
    if all(one.batch is None for one in guesses):
        raise ValueError(guesses[0].failure)
    figures = []
    for place, following, one in zip(places, places[1:], guesses, strict=False):
        guess = torch.zeros_like(images[place]) if one.batch is None else one.batch.inputs
        figures.append(compared(guess, images[place], images[following], candidates))
    row = {name: sum(each[name] for each in figures) for name in ("identified", "of", "control_identified")}
    return {
        **row,
        "victims": victims,
        "psnr": sum(each["psnr"] for each in figures) / victims,
        "control_psnr": sum(each["control_psnr"] for each in figures) / victims,
        "members": sorted({one.member or one.failure or "none" for one in guesses}),
        "budget": budget,
        **{name: round(value / victims, 1) for name, value in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--minutes", type=float, default=5, help="of CPU time, after which no cell is begun")
    parser.add_argument("--victims", type=int, default=2, help="of batches up to 2; one of larger ones")
    parser.add_argument("--images", type=int, default=500, help="that trained networks have seen")
    parser.add_argument("--only", default="", help="cells of this network, or of those held out of a version")
    parser.add_argument("--predict", default="", choices=HELD_OUT, help="only predict those held out of a version")
    parser.add_argument("--budget", default="quick", choices=["quick", "standard"])
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    test = load_data("cifar10_exact", root=str(options.data)).test.batch(torch.arange(CANDIDATES))
    candidates = PublicImages(images=test.inputs, labels=test.labels, name="test images")
    others = test.inputs[-options.images :], test.labels[-options.images :]
    kept, version = RowFile(options.out), options.predict or options.only
    before = RowFile(PREDICTED)
    asked = list(held_out(version) if version in HELD_OUT else cells())
    asked.sort(key=lambda cell: (before.find(cell) or {"predicted": "unknown"})["predicted"] == "unknown")
    for cell in asked:
        if time.process_time() > 60 * options.minutes:
            return
        if kept.find(cell) is not None or (version not in HELD_OUT and version not in ("", cell["network"])):
            continue
        model = network(cell, others)
        if options.predict:
            figures = {"version": version, **predicted(cell, model)}
        else:
            victims = options.victims if cell["batch"] <= _SMALL else 1
            try:
                figures = measured(cell, model, candidates, victims, options.budget)
            except ValueError as error:  # also of batch norm in training mode, which refuses a single value
                print(f"{cell} has no figure: {error}", flush=True)
                continue
        print(kept.add(cell, figures), flush=True)


if __name__ == "__main__":
    main()
