"""What a generator gives an attacker that descends on pixels has not (Refiner, Figures 7 and 8; GGL).

    fl-privacy train-generator data=cifar10 width=32 steps=2200 lr=4e-4 average=0.998 flip=true out=cifar10.safetensors
    fl-privacy train-evaluator data=cifar10 images=4000 widths=[16,32,64] epochs=3 lr=1e-3 out=evaluator.safetensors
    python experiments/generative_prior.py figure --generator cifar10.safetensors --evaluator evaluator.safetensors
    python experiments/generative_prior.py hard --generator cifar10.safetensors --evaluator evaluator.safetensors
    python experiments/generative_prior.py variants --generator cifar10.safetensors --evaluator evaluator.safetensors
    python experiments/generative_prior.py seen

``figure``: GGL against five defenses, on single images behind the LeNet of Refiner's own attacks: PSNR, SSIM, LPIPS,
the noise ratio of the evaluation network, and how often a classifier sees the class of the victim in what was found. It
was trained on CIFAR-10's training images, none of which is attacked. ``hard``: GGL beside Inverting Gradients where the
update says little about pixels. ``variants``: without a defense, the other ways to search. ``seen``: how near the
fingerprints of the same images are, and of others.

Each cell is a run of ``fl-privacy attack`` in a folder of its own: stopped and started again, it goes on where it was.
Pictures of both are written beside the runs, and a row a cell into ``rows.jsonl``.
"""

import argparse
import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from row_file import RowFile
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fl_privacy.cli.main import run_command_line
from fl_privacy.data import load_data
from fl_privacy.models.pretrained.generator import SIDE, image_fingerprints
from fl_privacy.runs.folder.read import read_run
from fl_privacy.runs.folder.summary import Statistic

VICTIMS = "cifar10_exact"
"""Of the test images of CIFAR-10."""

DEFENSES: Mapping[str, tuple[str, ...]] = {
    "none": ("defense=none",),
    "Soteria 0.5": ("defense=soteria", "defense.scores=estimated", "defense.rate=0.5"),
    "Soteria 0.9": ("defense=soteria", "defense.scores=estimated", "defense.rate=0.9"),
    "pruning 0.9": ("defense=pruning", "defense.rate=0.9"),
    "pruning 0.99": ("defense=pruning", "defense.rate=0.99"),
    "noise 1e-4": ("defense=dp_noise", "defense.clip_norm=1", "defense.scale=1e-4"),
    "noise 1e-2": ("defense=dp_noise", "defense.clip_norm=1", "defense.scale=1e-2"),
    "8 bits": ("defense=quantization", "defense.bits=8"),
    "2 bits": ("defense=quantization", "defense.bits=2"),
    "Refiner 0.01": ("defense=refiner", "defense.epsilon=0.01"),
    "Refiner 0.1": ("defense=refiner", "defense.epsilon=0.1"),
}

HARD: Mapping[str, tuple[str, ...]] = {
    "LeNet, pruning 0.99": ("experiment=refiner_paper_attack", "defense=pruning", "defense.rate=0.99"),
    "ResNet-20, batch 4": ("model=resnet20", "batch_size=4"),
    "ResNet-18, batch 4": ("model=resnet18", "batch_size=4"),
}

METRICS = ("psnr", "ssim", "lpips", "noise_ratio")


COLUMNS = ("", "PSNR", "SSIM", "LPIPS", "noise ratio", "class seen, %", "in the originals, %", "images")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


@dataclass(frozen=True, eq=False)
class Cell:
    """Images (N, C, H, W) uint8 and the metrics of one run."""

    originals: Tensor
    guesses: Tensor
    metrics: Mapping[str, Statistic]


def attacks(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    ggl = ("attack=ggl", f"attack.generator={options.generator.resolve()}", f"attack.iterations={options.iterations}")
    return {
        "GGL": (*ggl, "attack.lr=0.05", f"attack.weight={options.weight}"),
        "Inverting Gradients": ("attack=inverting_gradients", f"attack.iterations={options.iterations}"),
    }


def cell(options: argparse.Namespace, *overrides: str) -> Cell:
    """Run ``overrides``, or reuse the run if it has finished."""
    given = (*overrides, f"data={VICTIMS}", f"victims={options.victims}", f"evaluator={options.evaluator.resolve()}")
    if any("defense=refiner" in override for override in given):
        given = (*given, f"defense.evaluator={options.evaluator.resolve()}")
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = run_command_line(["attack", *given, f"seed={options.seed}", f"out={options.out / 'runs'}"])
    if status:
        raise SystemExit(status)
    run = read_run(Path([line for line in printed.getvalue().splitlines() if line.strip()][-1]))
    found = [pair for pair in run.read_pairs()[0].values() if pair.original is not None and pair.guess is not None]
    originals, guesses = (
        torch.stack([torch.from_numpy(getattr(pair, name)) for pair in found]) for name in ("original", "guess")
    )
    return Cell(originals, guesses, run.summary.plain.metrics)


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


def classifier(folder: Path, passes: int, seed: int) -> nn.Module:
    """Train a classifier on CIFAR-10, a quarter of the images in a pass; it is kept after each."""
    file, train = folder / "classifier.safetensors", load_data("cifar10").train
    torch.manual_seed(seed)
    model, done = network(), 0
    if file.exists():
        state = load_file(file)
        done = int(state.pop("passes"))
        model.load_state_dict(state)
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(done, passes):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed + number // 4))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - number / passes)
        model.train()
        for chosen in torch.split(order.chunk(4)[number % 4], 128):
            images = train.images[chosen].float() / 255
            images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
            loss = F.cross_entropy(model(images), train.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        folder.mkdir(parents=True, exist_ok=True)
        save_file({**model.state_dict(), "passes": torch.tensor(number + 1)}, file)
        print(f"classifier: {number + 1} of {passes} quarter passes, loss {loss.item():.2f}", flush=True)
    return model.eval()


@torch.no_grad()
def same_class(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Compute the percentage of ``images`` that the classifier puts into the class in ``labels``."""
    return 100 * float((model(images.float() / 255).argmax(1) == labels).double().mean())


def labels_of(originals: Tensor) -> Tensor:
    """Find the classes of original images among the victims' data."""
    test = load_data(VICTIMS).test
    known = {image.numpy().tobytes(): int(label) for image, label in zip(test.images, test.labels, strict=True)}
    return torch.tensor([known[image.numpy().tobytes()] for image in originals])


def write(place: str, case: str, found: Cell, model: nn.Module, options: argparse.Namespace) -> None:
    """Print a line of the table and keep its row."""
    labels = labels_of(found.originals)
    means = [found.metrics[name].mean if name in found.metrics else float("nan") for name in METRICS]
    seen = [same_class(model, images, labels) for images in (found.guesses, found.originals)]
    print(f"| {case} | {' | '.join(f'{mean:.3f}' for mean in means)} |", end="")
    print(f" {seen[0]:.0f} | {seen[1]:.0f} | {len(labels)} |", flush=True)
    RowFile(options.rows or options.out).add(
        {"place": place, "case": case, "iterations": options.iterations},
        {name: asdict(found.metrics[name]) for name in METRICS if name in found.metrics}
        | {"class_seen": seen[0] / 100, "class_in_originals": seen[1] / 100, "images": len(labels)},
    )


def draw(rows: Mapping[str, Tensor], file: Path) -> None:
    """Draw rows of images (N, C, H, W) uint8 with their names."""
    columns = min(12, *(len(images) for images in rows.values()))
    figure = Figure(figsize=(0.8 * columns + 1.8, 0.85 * len(rows)), dpi=130, layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (name, images) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(row, images[:columns], strict=True):
            axis.imshow(image.permute(1, 2, 0), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, fontsize=7, rotation=0, ha="right", va="center")
    figure.savefig(file)


def compared(place: str, chosen: Mapping[str, tuple[str, ...]], options: argparse.Namespace) -> None:
    """Print a table of the runs in ``chosen`` and draw their images."""
    model, rows = classifier(options.out, options.passes, options.seed), {}
    print(f"{place}\n\n{HEADER}")
    for name, overrides in chosen.items():
        found = cell(options, *overrides)
        write(place, name, found, model, options)
        rows = {**(rows or {"victims": found.originals}), name: found.guesses}
        draw(rows, options.out / f"{place}.png")


def figure(options: argparse.Namespace) -> None:
    ggl = ("experiment=refiner_paper_attack", *attacks(options)["GGL"])
    compared("figure", {name: (*ggl, *defense) for name, defense in DEFENSES.items()}, options)


def variants(options: argparse.Namespace) -> None:
    generator = f"attack.generator={options.generator.resolve()}"
    stages, moves = max(1, options.iterations // 3), max(1, options.iterations // 25)
    chosen = {
        **attacks(options),
        "GGL, CMA-ES": ("attack=ggl", generator, "attack.optimizer=cma", f"attack.iterations={moves}"),
        "GIFD": ("attack=gifd", generator, f"attack.iterations={stages}"),
        "untrained network": (*attacks(options)["Inverting Gradients"], "attack.space=network"),
    }
    compared(
        "variants",
        {name: ("experiment=refiner_paper_attack", "defense=none", *a) for name, a in chosen.items()},
        options,
    )


def hard(options: argparse.Namespace) -> None:
    for place, overrides in HARD.items():
        if not options.only or any(part in place for part in options.only):
            compared(place, {name: (*overrides, *attack) for name, attack in attacks(options).items()}, options)


def seen(options: argparse.Namespace) -> None:
    known = image_fingerprints(load_data("cifar10").train.images).float()
    exact = load_data(VICTIMS)
    for name, images in (("the same, before compression", exact.train.images[:1000]), ("others", exact.test.images)):
        asked = torch.split(image_fingerprints(images).float(), 256)
        apart = torch.cat([torch.cdist(part, known).amin(1) for part in asked]) / SIDE
        print(
            f"{name}: {apart.min():.1f} to {apart.max():.1f} grey levels to the nearest of CIFAR-10's training images"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("figure", "hard", "variants", "seen"))
    parser.add_argument("--generator", type=Path)
    parser.add_argument("--evaluator", type=Path)
    parser.add_argument("--victims", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--weight", type=float, default=1e-3, help="of the penalty on latents")
    parser.add_argument("--passes", type=int, default=12, help="of the classifier, through a quarter of its images")
    parser.add_argument("--only", nargs="*", default=[], help="of hard, such as ResNet-20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/generative_prior"), help="folder of runs and pictures")
    parser.add_argument("--rows", type=Path, help="folder of rows.jsonl; without it that of --out")
    options = parser.parse_args(arguments)
    if options.what != "seen" and (options.generator is None or options.evaluator is None):
        parser.error(f"{options.what} needs --generator and --evaluator")
    {"figure": figure, "hard": hard, "variants": variants, "seen": seen}[options.what](options)


if __name__ == "__main__":
    main()
