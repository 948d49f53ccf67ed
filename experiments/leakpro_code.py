"""LeakPro's inversion of updates whose batch norm is in training mode, next to ours, on the same updates.

    python experiments/leakpro_code.py DATA --leakpro FOLDER --packages FOLDER --out experiments/rows/leakpro_code

DATA holds CIFAR-10's test images (``cifar10_exact``) and `weights/cifar10_resnet20.safetensors`, ``--leakpro`` a
checkout of aidotse/LeakPro, ``--packages`` Numba, Optuna, PyTorch Ignite, seaborn and torchmetrics, which it imports. A
client takes one step of SGD on ``--batch`` images behind a residual network and uploads weights and running statistics.
Both attacks know the classes: LeakPro's ``GIABaseRunning`` (running statistics) and ``GIABase`` (statistics of other
images) with their own settings, except for ``--iterations`` of 10,000, and ``attack=auto``. LeakPro chooses the best of
its iterates by comparing them with the truth; ours does not see it. A row for each victim and attack: PSNR and SSIM
after assignment, images identified among 1,000, and CPU seconds of one thread. Controls are the same guess compared
with the next client's images, and the mean of the 1,000 images. Rows that are there are not computed again.
"""

import argparse
import contextlib
import copy
import io
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trained_resnet
from map_of_trainings import CANDIDATES, RATE, SHAPE, preactivated
from row_file import RowFile, takes_rows
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy import Observation, reconstruct
from fl_privacy.data import load_data
from fl_privacy.measure.identification import PublicImages
from fl_privacy.measure.images import psnr, ssim
from fl_privacy.types import Batch, LocalPlan

NETWORKS = {"pre-activation ResNet-8, wide": ((32, 64, 128), 1), "pre-activation ResNet-14": ((16, 32, 64), 2)}
TRAINED = "ResNet-20, trained"
MEAN, STD = 0.5, 0.25
LEAKPRO = ("GIABaseRunning", "GIABase")


class Published(nn.Module):
    """The published ResNet-20, which normalizes images itself, for images that LeakPro normalized beforehand."""

    def __init__(self, data: Path) -> None:
        super().__init__()
        self.inner = trained_resnet.network("trained", data)

    def forward(self, images: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to logits."""
        logits: Tensor = self.inner(images * STD + MEAN)
        return logits


class Normalized(nn.Module):
    """A network behind the normalization that LeakPro applies to its images beforehand."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) in [0, 1] to logits."""
        logits: Tensor = self.inner((images - MEAN) / STD)
        return logits


def network(name: str, data: Path, seed: int = 0) -> nn.Module:
    """Build an untrained network, or the published one."""
    torch.manual_seed(seed)
    return Published(data).train() if name == TRAINED else preactivated(*NETWORKS[name]).train()


def by_leakpro(name: str, model: nn.Module, batch: Batch, others: Tensor, iterations: int) -> Tensor:
    """Reconstruct images (B, 3, H, W) in [0, 1] by a class of LeakPro, with its own settings."""
    from leakpro.attacks.gia_attacks import gia_estimate, gia_running  # noqa: PLC0415

    def loader(some: Tensor) -> DataLoader[Any]:
        return DataLoader(TensorDataset((some - MEAN) / STD, batch.labels), batch_size=len(some))

    one = torch.ones(3, 1, 1)
    if name == "GIABaseRunning":
        settings = gia_running.GIABaseRunningConfig(at_iterations=iterations)
        attack = gia_running.GIABaseRunning(model, loader(batch.inputs), MEAN * one, STD * one, configs=settings)
    else:
        settings = gia_estimate.GIABaseConfig(at_iterations=iterations)
        attack = gia_estimate.GIABase(
            model, loader(batch.inputs), MEAN * one, STD * one, proxy_loader=loader(others), configs=settings
        )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        attack.prepare_attack()
        *_, (_, _, result) = attack.run_attack()
    found = torch.cat([inputs for inputs, _ in result.recreated_data])
    return (found.detach().cpu() * STD + MEAN).clamp(0, 1)


def by_auto(model: nn.Module, images: Tensor, labels: Tensor, budget: str) -> tuple[Tensor, str]:
    """Reconstruct images by ``attack=auto`` from weights and running statistics after one step; name the attack."""
    before = Normalized(model).train()
    after = copy.deepcopy(before)
    nn.functional.cross_entropy(after(images), labels).backward()
    torch.optim.SGD(after.parameters(), lr=RATE).step()
    plan = LocalPlan(shares="delta", lr=RATE, steps=1, batch_size=len(images), batch_norm="train", mode="train")
    seen = Observation.of_update(
        before, after, plan, input_shape=SHAPE, num_examples=len(images), loss="cross_entropy"
    ).given(labels=labels)
    (found,) = reconstruct([seen], "auto", budget=budget)
    if found.batch is None:
        raise SystemExit(found.failure)
    return found.batch.inputs, found.member or "none"


def similarity(guesses: Tensor, images: Tensor) -> float:
    """Return the mean SSIM of images and their guesses, assigned by PSNR."""
    each = torch.stack([psnr(guess.expand_as(images), images) for guess in guesses])
    guess, image = linear_sum_assignment(each.numpy(), maximize=True)
    return float(ssim(guesses[guess], images[image]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--leakpro", type=Path, help="checkout; without it only ours runs")
    parser.add_argument("--packages", type=Path, help="folder with the packages that it imports")
    parser.add_argument("--network", choices=(*NETWORKS, TRAINED), default=next(iter(NETWORKS)))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--victims", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=10000)
    parser.add_argument("--budget", default="standard", choices=["quick", "standard"])
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path += [str(path) for path in (options.leakpro, options.packages) if path]
    test = load_data("cifar10_exact", root=str(options.data)).test.batch(torch.arange(CANDIDATES))
    candidates, kept = PublicImages(images=test.inputs, labels=test.labels, name="test images"), RowFile(options.out)
    for victim in range(options.victims):
        own, other, third = (slice((victim + k) * options.batch, (victim + k + 1) * options.batch) for k in range(3))
        images, labels = test.inputs[own], test.labels[own]
        for attack in ("auto", *(LEAKPRO if options.leakpro else ())):
            key = {"network": options.network, "batch": options.batch, "victim": victim, "attack": attack}
            key["budget"] = options.budget if attack == "auto" else f"{options.iterations} iterations"
            if kept.find(key) is not None:
                continue
            model, member, began = network(options.network, options.data), "", time.process_time()
            if attack == "auto":
                guesses, member = by_auto(model, images, labels, options.budget)
            else:
                guesses = by_leakpro(attack, model, Batch(images, labels), test.inputs[third], options.iterations)
            used = round(time.process_time() - began, 1)
            figures = trained_resnet.compared(guesses, images, test.inputs[other], candidates)
            figures["ssim"] = similarity(guesses, images)
            figures["mean_image_psnr"] = float(psnr(test.inputs.mean(0).expand_as(images), images).mean())
            print(kept.add(key, {"member": member, **figures, "cpu_seconds": used}), flush=True)


if __name__ == "__main__":
    main()
