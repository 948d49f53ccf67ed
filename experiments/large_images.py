"""One large image: memory and time of an iteration of Inverting Gradients, beside a plain loop.

    python experiments/large_images.py --out experiments/rows/large_images

Each network in a process of its own, whose largest resident set is that of the engine alone; then an iteration
of either in turn, CPU time. The networks are untrained, the image is noise: neither changes the time. A row that is
there is not measured again.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from row_file import RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy.attacks import inverting_gradients
from fl_privacy.models import ViT
from fl_privacy.models.gradients import differentiable_twice
from fl_privacy.types import Observation

CLASSES = 1000


def of_torchvision(name: str) -> nn.Module:
    import torchvision  # noqa: PLC0415

    return getattr(torchvision.models, name)(num_classes=CLASSES)


def vit(side: int) -> nn.Module:
    blocks = {"patch_size": 16, "depth": 12, "token_width": 768, "heads": 12, "mlp_width": 3072}
    return ViT(in_channels=3, image_size=side, num_classes=CLASSES, **blocks)


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ResNet-18, 112": (lambda: of_torchvision("resnet18"), 112),
    "ResNet-18, 224": (lambda: of_torchvision("resnet18"), 224),
    "ResNet-50, 224": (lambda: of_torchvision("resnet50"), 224),
    "ViT-B/16, 224": (lambda: vit(224), 224),
}


class EnoughError(Exception):
    """Ends an attack that has been measured."""


def victim_of(model: nn.Module, side: int, image: Tensor | None = None) -> Observation:
    """Compute what a server sees of a client that shares the gradient of one image."""
    model.eval()
    image = torch.rand(1, 3, side, side) if image is None else image
    gradients = torch.autograd.grad(F.cross_entropy(model(image), torch.tensor([3])), list(model.parameters()))
    return Observation.of_gradients(model, gradients, input_shape=(3, side, side))


def plain_iteration(model: nn.Module, victim: Observation) -> Callable[[], None]:
    """Return a function that runs one iteration of the published loop."""
    label, observed = torch.tensor([3]), [victim.upload.tensors[name] for name, _ in model.named_parameters()]
    image = torch.randn(1, 3, *victim.input_shape[1:]).requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.1)

    def iterate() -> None:
        with differentiable_twice():
            loss = F.cross_entropy(model(image), label)
            guesses = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            dot = torch.stack([(g * o).sum() for g, o in zip(guesses, observed, strict=True)]).sum()
            lengths = [torch.stack([t.square().sum() for t in some]).sum().sqrt() for some in (guesses, observed)]
            across, down = image.diff(dim=-1).abs().mean(), image.diff(dim=-2).abs().mean()
            cosine = 1 - dot / (lengths[0] * lengths[1])
            (gradient,) = torch.autograd.grad(cosine + 1e-4 * (across + down), image)
        image.grad = gradient.sign_()
        optimizer.step()
        with torch.no_grad():
            image.clamp_(0, 1)

    return iterate


def measure(name: str, iterations: int) -> dict[str, Any]:
    """Measure one case in this process."""
    make, side = CASES[name]
    torch.manual_seed(0)
    model = make()
    victim, attack = victim_of(model, side), replace(inverting_gradients(compile="off"), iterations=4800)
    ours, theirs, peaks = list[float](), list[float](), list[float]()
    iterate: Callable[[], None] | None = None
    latest = time.process_time()

    def progress(done: int, total: int) -> None:
        nonlocal latest, iterate
        ours.append(time.process_time() - latest)
        if len(ours) == 3:
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
            iterate = plain_iteration(model, victim)
            iterate()
        if iterate is not None:
            began = time.process_time()
            iterate()
            theirs.append(time.process_time() - began)
        if len(theirs) > iterations:
            raise EnoughError
        latest = time.process_time()

    with suppress(EnoughError):
        attack([victim], seed=0, progress=progress)
    own, plain = ours[3:], theirs[:-1]
    ratios = [o / p for o, p in zip(own, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    seconds = {"seconds": statistics.median(own), "loop_seconds": statistics.median(plain)}
    return {"peak_gib": peaks[0], **seconds, "ratio": middle, "q1": low, "q3": high, "iterations": len(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", choices=CASES, help="measure one in this process and print its row")
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.alone:
        print(json.dumps(measure(options.alone, options.iterations)))
        return
    kept = RowFile(options.out)
    for name in options.cases:
        key = {"network": name, "threads": options.threads}
        if kept.find(key):
            continue
        again = [sys.executable, __file__, "--alone", name, "--iterations", str(options.iterations)]
        again += ["--threads", str(options.threads)]
        done = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True)
        print(kept.add(key, json.loads(done.stdout.strip().splitlines()[-1])))


if __name__ == "__main__":
    main()
