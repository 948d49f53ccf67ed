"""Operations and bytes of an iteration on one victim, by model, and what machines could make of them: computed.

    python experiments/roofline.py --out experiments/rows/roofline

Counted on shapes alone (PyTorch's ``meta`` device), of what a plain loop does: loss, gradient, cosine, and the
gradient of that by the image. Operations are those of products and convolutions. Bytes are what every
operation reads and writes, as if nothing stayed in a cache: an upper end. The least time is the larger of operations by
peak and bytes by bandwidth; no attack does better but by fewer bytes, and most reach a part of it. Of this machine peak
and bandwidth are measured, of others they are their makers'.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from row_file import RowFile, takes_rows
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fl_privacy.models import ConvNet, LeNet, ResNet18, ResNet20, ViT
from fl_privacy.models.gradients import differentiable_twice

SMALL = {"in_channels": 3, "image_size": 32, "num_classes": 10}
LARGE = {"in_channels": 3, "image_size": 224, "num_classes": 1000}
VIT_S = {"patch_size": 16, "depth": 12, "token_width": 384, "heads": 6, "mlp_width": 1536}


def of_torchvision(name: str) -> nn.Module:
    import torchvision  # noqa: PLC0415

    return getattr(torchvision.models, name)()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LeNet": (lambda: LeNet(**SMALL), 32),
    "ConvNet": (lambda: ConvNet(**SMALL, width=8), 32),
    "ResNet-20": (lambda: ResNet20(**SMALL, width=16), 32),
    "ResNet-18": (lambda: ResNet18(**SMALL), 32),
    "ResNet-18, 224": (lambda: of_torchvision("resnet18"), 224),
    "ResNet-50, 224": (lambda: of_torchvision("resnet50"), 224),
    "ViT-S/16, 224": (lambda: ViT(**LARGE, **VIT_S), 224),
}
ITERATIONS = 4800
"""Of Inverting Gradients on one image, as ``attack_speed.py`` counts a victim."""


@dataclass(frozen=True)
class Machine:
    """GFLOP/s of single precision without tensor cores, as attacks compute, and GB/s of memory."""

    name: str
    gflops: float
    gb_s: float
    source: str


GPUS = (
    Machine("A100 80 GB SXM", 19_500, 2_039, "NVIDIA A100 datasheet"),
    Machine("H100 80 GB SXM", 67_000, 3_350, "NVIDIA H100 datasheet"),
)


class Counted(TorchDispatchMode):
    """Counts operations, and bytes read and written; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        written = [t for t in tree_leaves(result) if isinstance(t, Tensor) and not t._is_view()]
        if written:
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in (*written, *read))
        return result


def count(make: Callable[[], nn.Module], side: int) -> tuple[int, int]:
    """Count the operations and bytes of one iteration on one image."""
    with torch.device("meta"):
        model, image = make().eval(), torch.empty(1, 3, side, side, requires_grad=True)
        observed, label = [torch.empty_like(p) for p in model.parameters()], torch.zeros(1, dtype=torch.int64)
    with differentiable_twice(), Counted() as counted:
        loss = F.cross_entropy(model(image), label)
        guesses = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        dot = torch.stack([(g * o).sum() for g, o in zip(guesses, observed, strict=True)]).sum()
        squared = torch.stack([g.square().sum() for g in guesses]).sum()
        torch.autograd.grad(1 - dot / squared.sqrt(), image)
    return counted.flops, counted.bytes


def peak() -> float:
    """Measure the GFLOP/s of a large convolution."""
    images, weight, best = torch.randn(16, 128, 32, 32), torch.randn(128, 128, 3, 3), float("inf")
    for _ in range(10):
        started = time.perf_counter()
        F.conv2d(images, weight, padding=1)
        best = min(best, time.perf_counter() - started)
    return 2 * 16 * 128 * 128 * 9 * 1024 / best / 1e9


def bandwidth(repeats: int = 10) -> float:
    """Measure the GB/s that a copy reads and writes."""
    source = torch.ones(64 << 20)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return 2 * source.nbytes / best / 1e9


def this_machine(threads: int) -> Machine:
    torch.set_num_threads(threads)
    name = f"this machine, {threads} thread{'s' * (threads > 1)}"
    return Machine(name, peak(), bandwidth(), "measured")


def bound(flops: float, moved: float, machine: Machine) -> tuple[float, str]:
    """Compute the least seconds of an iteration, and whether operations or bytes limit it."""
    computing, moving = flops / machine.gflops / 1e9, moved / machine.gb_s / 1e9
    return max(computing, moving), "operations" if computing > moving else "bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    machines = [this_machine(options.threads), *GPUS]
    counted = {name: count(*MODELS[name]) for name in options.models}
    for name, (flops, moved) in counted.items():
        figures: dict[str, Any] = {"gigaoperations": flops / 1e9, "megabytes": moved / 1e6}
        print(kept.add({"model": name}, figures | {"operations_a_byte": flops / moved}))
    for machine in machines:
        limits = {"gflop_s": machine.gflops, "gb_s": machine.gb_s, "source": machine.source}
        print(kept.add({"machine": machine.name}, limits | {"operations_a_byte": machine.gflops / machine.gb_s}))
    for machine in machines:
        for name, (flops, moved) in counted.items():
            least, by = bound(flops, moved, machine)
            hourly = 3600 / (ITERATIONS * least)
            gpus = (1,) if machine is machines[0] else (1, 8, 64)
            at_most = {f"victims_an_hour_on_{n}": n * hourly for n in gpus}
            row = {"computed_for": machine.name, "network": name}
            print(kept.add(row, {"microseconds": 1e6 * least, "limited_by": by, **at_most}))


if __name__ == "__main__":
    main()
