"""What is reconstructed behind trained networks, such as CIFAR-10's ResNet-20 (He et al. 2016; 91.6 % on these images).

    python experiments/trained_resnet.py DATA --victims 16 --out experiments/rows/trained_resnet
    python experiments/trained_resnet.py DATA --network resnet56 --victims 2 --out experiments/rows/trained_resnet
    python experiments/trained_resnet.py DATA --network efficientnet --victims 1 --evaluations 100 \
        --out experiments/rows/trained_resnet

DATA holds `weights/cifar10_resnet{20,32,56}.safetensors` (akamaster/pytorch_resnet_cifar10) and
`cifar10_exact/test.parquet`; for EfficientNet-Lite0 `imagenet_efficientnet_lite0.safetensors` and `imagenet_sample`,
whose images are compared at 64x64.
Each victim is a client with one test image, or with several. A row says how near the reconstruction is, whether the
image is identified among 1,000 others, and the same of the reconstruction of another client's update, as a control.
Rows that are there are not computed again.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from efficientnet import EfficientNetLite0
from row_file import RowFile, takes_rows
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from fl_privacy import Observation, reconstruct
from fl_privacy.data import load_data
from fl_privacy.measure.identification import PublicImages, identify
from fl_privacy.measure.images import psnr
from fl_privacy.measure.outcome import Outcome, outcome_of
from fl_privacy.models import ResNet18

CANDIDATES = 1000
FILES = {"trained": ("cifar10_resnet20", 3), "resnet32": ("cifar10_resnet32", 5), "resnet56": ("cifar10_resnet56", 9)}
"""Published weights and blocks a stage by network."""
LARGE, COMPARED = "efficientnet", 64
"""The network of photographs at 224x224, and the side at which these are identified."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Two convolutions with a shortcut without parameters: every second place, missing channels zero (option A)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.stride, self.missing = stride, (outer - inner) // 2

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, inner, H, W) -> (B, outer, H / stride, W / stride)."""
        outputs = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(inputs)))))
        if self.stride > 1:
            inputs = F.pad(inputs[:, :, ::2, ::2], (0, 0, 0, 0, self.missing, self.missing))
        return F.relu(outputs + inputs)


class Published(nn.Module):
    """ResNet of 6 N + 2 layers with the names of the published weights, N blocks a stage: 3 are ResNet-20."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(STD)[:, None, None], persistent=False)
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), *(Block(32, 32, 1) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Block(32, 64, 2), *(Block(64, 64, 1) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, 32, 32) in [0, 1] to logits (B, 10)."""
        features = F.relu(self.bn1(self.conv1((images - self.mean) / self.std)))
        features = self.layer3(self.layer2(self.layer1(features)))
        logits: Tensor = self.linear(features.mean((2, 3)))
        return logits


def network(name: str, data: Path) -> nn.Module:
    """Build a network of ``FILES``, trained, ``untrained`` (ResNet-20) or ``resnet18``, both of PyTorch's values."""
    torch.manual_seed(0)
    if name == "resnet18":
        return ResNet18(in_channels=3, image_size=32, num_classes=10, mean=MEAN, std=STD)
    if name == LARGE:
        large, values = EfficientNetLite0(), load_file(data / "weights" / "imagenet_efficientnet_lite0.safetensors")
        large.load_state_dict({key: value.float() for key, value in values.items()})
        return large
    file, blocks = FILES.get(name, ("", 3))
    model = Published(blocks)
    if file:
        values = load_file(data / "weights" / f"{file}.safetensors")
        model.load_state_dict({key: value.float() for key, value in values.items()}, strict=False)
    return model


def observe(model: nn.Module, images: Tensor, labels: Tensor, mode: str) -> Observation:
    """Observe one update of a client, in single precision; in training mode, with its running statistics."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.train(mode == "train")
    gradient = torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))
    after = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    model.eval()
    shape = tuple(images.shape[1:])
    seen = Observation.of_gradients(model, gradient, input_shape=shape, batch_size=len(images), batch_norm=mode)
    statistics = {name: after[name] for name in seen.sent.buffers if mode == "train"}
    return replace(seen, upload=replace(seen.upload, buffers={**seen.upload.buffers, **statistics}))


def figures(guesses: Tensor, images: Tensor, candidates: PublicImages) -> Iterator[dict[str, Any]]:
    """Compare guesses with each image: PSNR of the nearest guess, and whether it is identified."""
    found = identify(compared_at(guesses), compared_at(images), candidates)
    for place, image in enumerate(images):
        apart = float(psnr(guesses[int(found.guess[place])][None], image[None]))
        record = {"psnr": apart, "candidates": found.candidates}
        for name in ("likeness", "rank", "lead", "foreign"):
            record[name] = float(getattr(found, name)[place])
        yield {
            "psnr": apart,
            "identified": outcome_of(record) in (Outcome.EXACT, Outcome.IDENTIFIED),
            "rank": int(record["rank"]),
        }


def compared_at(images: Tensor) -> Tensor:
    """Make images that are larger than ``COMPARED`` so small."""
    if images.shape[-1] <= COMPARED:
        return images
    return F.interpolate(images, (COMPARED, COMPARED), mode="area").clamp(0, 1)


def attacked(options: argparse.Namespace, kept: RowFile, model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Attack every victim that has no row yet, a chunk at a time, and keep the rows."""
    candidates = PublicImages(images=rivals(images, options.data), name="test images")
    key = {name: getattr(options, name) for name in ("network", "mode", "batch")}
    key["budget"] = f"{options.evaluations} evaluations" if options.evaluations else options.budget
    missing = [v for v in range(options.victims) if kept.find({**key, "victim": v}) is None]
    for begin in range(0, len(missing), options.together):
        some = missing[begin : begin + options.together]
        places = [slice(v * options.batch, (v + 1) * options.batch) for v in some]
        seen = [observe(model, images[place], labels[place], options.mode) for place in places]
        began, cpu = time.perf_counter(), time.process_time()
        named = options.budget in ("quick", "standard", "thorough")
        budget = {"budget": options.budget if named else float(options.budget)}
        found = reconstruct(seen, "auto", **({"evaluations": options.evaluations} if options.evaluations else budget))
        took, used = time.perf_counter() - began, time.process_time() - cpu
        times = {"seconds": took / len(some), "cpu_seconds": used / len(some)}
        for victim, place, one in zip(some, places, found, strict=True):
            guesses = torch.zeros_like(images[place]) if one.batch is None else one.batch.inputs
            other = (victim + 1) % (len(images) // options.batch)
            foreign = images[other * options.batch : (other + 1) * options.batch]
            row = {"member": one.member or "none", **compared(guesses, images[place], foreign, candidates), **times}
            print(kept.add({**key, "victim": victim}, row), flush=True)
            if options.pictures:
                options.pictures.mkdir(parents=True, exist_ok=True)
                name = f"{options.network}_{options.mode}_{options.batch}_{victim}.png"
                to_pil_image(pair_of(images[place], guesses)).save(options.pictures / name)


def compared(guesses: Tensor, images: Tensor, foreign: Tensor, candidates: PublicImages) -> dict[str, Any]:
    """Compare guesses with a client's images and, as a control, with those of a client that they are not of."""
    own, control = (list(figures(guesses, each, candidates)) for each in (images, foreign))
    flat = images.mean((2, 3), keepdim=True).expand_as(images)
    return {
        "psnr": mean(each["psnr"] for each in own),
        "identified": sum(each["identified"] for each in own),
        "of": len(own),
        "worst_rank": max(each["rank"] for each in own),
        "control_psnr": mean(each["psnr"] for each in control),
        "control_identified": sum(each["identified"] for each in control),
        "mean_color_psnr": mean(psnr(flat, images).tolist()),
    }


def rivals(images: Tensor, data: Path) -> Tensor:
    """Return the images among which one has to be identified: the attacked ones and, where they are few, others."""
    if len(images) == CANDIDATES:
        return compared_at(images)
    others = load_data("imagenet_sample", root=str(data)).train
    missing = CANDIDATES - len(images)
    return torch.cat([compared_at(images), compared_at(others.batch(torch.arange(missing)).inputs)])


def pair_of(images: Tensor, guesses: Tensor) -> Tensor:
    """Put guesses below their images, (3, 2 H, B W)."""
    rows = [torch.cat(list(each.clamp(0, 1)), 2) for each in (images, guesses)]
    return torch.cat(rows, 1)


def mean(values: Iterable[float]) -> float:
    """Average numbers."""
    own = list(values)
    return sum(own) / len(own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--network", choices=(*FILES, LARGE, "untrained", "resnet18"), default="trained")
    parser.add_argument("--mode", choices=("eval", "train"), default="eval", help="of the client's batch norm")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budget", default="quick")
    parser.add_argument("--evaluations", type=int, help="of a victim, instead of the budget")
    parser.add_argument("--victims", type=int, default=16)
    parser.add_argument("--together", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pictures", type=Path, help="folder for images above their reconstructions")
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    large = options.network == LARGE
    test = load_data("imagenet_sample" if large else "cifar10_exact", root=str(options.data)).test
    images = test.batch(torch.arange(min(CANDIDATES, len(test))))
    attacked(options, RowFile(options.out), network(options.network, options.data), images.inputs, images.labels)


if __name__ == "__main__":
    main()
