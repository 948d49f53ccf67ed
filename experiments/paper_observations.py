"""What papers observe in words or in pictures alone, measured over images; a row for each case.

    python experiments/paper_observations.py effects --images 4 --iterations 100 --out experiments/rows/ats_effects
    python experiments/paper_observations.py edges --images 200 --out experiments/rows/ats_edges
    python experiments/paper_observations.py courses --images 6 --out experiments/rows/sapag_courses
    python experiments/paper_observations.py descent --evaluator FILE --out experiments/rows/refiner_descent
    python experiments/paper_observations.py solid --run runs/spn_solid/* --out experiments/rows/spn_solid

``effects`` (ATS, 5.7, 5.8, Figures 16, 17): images under single operations, under a policy that was searched and one
that was drawn; the PSNR of what Adam with the cosine reconstructs of the transformed image, and the cosine of its
gradient to the true one in the first two convolutions and in the last two; also from the mean of other images of the
right class, or of the next one. ``edges``: the share of edges (Canny) that is left. ``courses`` (SAPAG, VI-B-3): at how
many recorded steps the loss is more than ten times its least so far. ``descent`` (Refiner, 6.2, Figure 13): distance of
the gradients in parts of the start's, and predicted noise ratio, over the iterations of Equation 2. ``solid`` (SPN,
captions of Figures 12, 16): squared error of pixels that are black or white, and of the others, of a run's pictures.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ats_correlation import transformed_as
from refiner_distance import statistic
from refiner_pictures import attack_of, client_steps, configured, distance, gradient, observation, robust_series
from row_file import Row, RowFile, takes_rows
from sapag_forms import overrides_of
from skimage.feature import canny
from torch import Tensor
from torch.nn import functional as F

from fl_privacy.attacks import GradientInversion
from fl_privacy.attacks.gradient_inversion.settings import Given
from fl_privacy.measure.images import psnr
from fl_privacy.models.pretrained.evaluator_files import load_evaluator
from fl_privacy.runs.build import build_dataset
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.folder import read_run
from fl_privacy.types import Knowledge, VictimId

POLICIES = {
    "none": "none",
    "searched": "21-3-16",
    "drawn": "19-1-18",
    "shift": "3",
    "brightness": "15",
    "equalize": "9",
    "solarize": "37",
}
STARTS = {"searched, right class": 0, "searched, another class": 1, "none, right class": 0, "none, another class": 1}


def edges(images: Tensor) -> Tensor:
    """Count the pixels (N,) that Canny's detector marks."""
    return torch.tensor([int(canny(image.mean(0).numpy(), sigma=1.0).sum()) for image in images]).double()


def cosines(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """Return the mean over layers of the cosine of their gradients."""
    return torch.stack([F.cosine_similarity(one[n].flatten(), other[n].flatten(), dim=0) for n in names]).mean()


def effects(options: argparse.Namespace, kept: RowFile) -> None:
    """Attack images under each policy, and from starts that guess what they show."""
    settings = ["data=cifar10_exact", "model=resnet20", "model.width=16", "attack=ats_adam_cosine"]
    config = compose_run([*settings, f"attack.iterations={options.iterations}"])
    steps, others = client_steps(config, options.images), build_dataset(config.data).train.batch(torch.arange(2000))
    originals = torch.cat([step.batch.inputs for step in steps])
    layers = [name for name, tensor in steps[0].model.named_parameters() if tensor.dim() == 4]
    means = torch.stack([others.inputs[others.labels == label].mean(0) for label in range(10)])
    for case in [*POLICIES, *STARTS]:
        key: Row = {"case": case, "images": options.images, "iterations": options.iterations}
        if kept.find(key) is not None:
            continue
        goals = transformed_as(originals, POLICIES[case.partition(",")[0]], "paper")
        found: dict[str, list[Tensor]] = {"psnr": [], "shallow": [], "deep": []}
        attack = attack_of(config)
        for number, (step, goal) in enumerate(zip(steps, goals, strict=True)):
            true = gradient(step, goal[None])
            if case in STARTS:
                assert isinstance(attack, GradientInversion)
                attack = replace(attack, start=Given(images=means[(int(step.batch.labels) + STARTS[case]) % 10]))
            (read,) = attack(
                [observation(VictimId(0, 0, number), step, true)],
                seed=0,
            )
            assert read.batch is not None, read.failure
            again = gradient(step, read.batch.inputs)
            found["psnr"].append(psnr(read.batch.inputs.clamp(0, 1), goal[None])[0])
            found["shallow"].append(cosines(again, true, layers[:2]))
            found["deep"].append(cosines(again, true, layers[-2:]))
        figures = {name: statistic(torch.stack(values)) for name, values in found.items()}
        print(kept.add(key, figures), flush=True)


def edged(options: argparse.Namespace, kept: RowFile) -> None:
    """Measure the share of edges that each operation leaves."""
    images = build_dataset(compose_run(["data=cifar10_exact"]).data).test.batch(torch.arange(options.images)).inputs
    for case, policy in POLICIES.items():
        left = edges(transformed_as(images, policy, "paper")) / edges(images).clamp_min(1)
        print(kept.add({"case": case}, {"edges": statistic(left), "images": len(left)}))


def courses(options: argparse.Namespace, kept: RowFile) -> None:
    """Count how often the loss of DLG jumps, by L-BFGS and by AdamW."""
    for optimizer, iterations in (("lbfgs", options.iterations), ("adamw", 5 * options.iterations)):
        cell: Row = {"form": "DLG", "optimizer": optimizer, "init": "uniform_0.5", "iterations": iterations}
        if kept.find(cell) is not None:
            continue
        config, jumps, ends = compose_run(overrides_of(cell)), [], []
        for number, step in enumerate(client_steps(config, options.images)):
            view = observation(VictimId(0, 0, number), step, gradient(step, step.batch.inputs))
            (read,) = attack_of(config)([replace(view, knowledge=Knowledge())], seed=0)
            loss = torch.tensor(read.history)
            least = loss.cummin(0).values
            jumps.append((~(loss[1:] <= 10 * least[:-1])).double().mean())
            ends.append(float(psnr(read.batch.inputs, step.batch.inputs)) if read.batch is not None else 0.0)
        jumped = sum(bool(share) for share in jumps)
        figures = {"jumps": statistic(torch.stack(jumps)), "jumped": jumped, "psnr": statistic(torch.tensor(ends))}
        print(kept.add(cell, {**figures, "images": len(jumps)}), flush=True)


def descent(options: argparse.Namespace, kept: RowFile) -> None:
    """Follow Refiner's data, as printed, over thirty iterations."""
    network, config = load_evaluator(options.evaluator), configured(options)
    ways, ratios = [], []
    for step in client_steps(config, options.images):
        clean = gradient(step, step.batch.inputs)
        series = robust_series(step, network, 30, relative=False)
        apart = torch.tensor([distance(gradient(step, images), clean) for images in series])
        ways.append(apart / apart[0])
        ratios.append(torch.stack([network(images).detach().flatten()[0] for images in series]))
    for number in (0, 1, 2, 5, 10, 15, 20, 30):
        of = {"distance": torch.stack(ways)[:, number], "noise_ratio": torch.stack(ratios)[:, number]}
        print(kept.add({"iteration": number}, {name: statistic(values) for name, values in of.items()}))


def pictures(run: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the original (C, H, W) and what was read of it, in [0, 1]."""
    for pair in read_run(run).read_pairs()[0].values():
        if pair.guess is not None:
            yield torch.from_numpy(pair.original.copy()) / 255, torch.from_numpy(pair.guess.copy()) / 255


def solid(options: argparse.Namespace, kept: RowFile) -> None:
    """Compare the errors of black and white pixels with those of the others, over images that have both."""
    for run in options.run:
        pairs = []
        for original, guess in pictures(run):
            error, extreme = (original - guess).square().mean(0), ((original == 0) | (original == 1)).all(0)
            if extreme.any() and not extreme.all():
                pairs.append(torch.stack([error[extreme].mean(), error[~extreme].mean()]))
        config: Mapping[str, Any] = read_run(run).identity.config
        key = {"data": config["data"]["name"], "defense": config["choices"]["defense"]}
        for name, errors in zip(("solid", "others"), torch.stack(pairs).T, strict=True):
            figures = {"error": statistic(errors), "excess": statistic(errors - torch.stack(pairs)[:, 1])}
            print(kept.add({**key, "pixels": name}, {**figures, "images": len(errors)}))


PARTS = {"effects": effects, "edges": edged, "courses": courses, "descent": descent, "solid": solid}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--evaluator", type=Path, help="for descent")
    parser.add_argument("--run", type=Path, nargs="+", default=[], help="folders of runs, for solid")
    takes_rows(parser)
    options = parser.parse_args()
    options.data, options.seed, options.override = "cifar10_exact", 0, []  # what `configured` asks for
    torch.set_num_threads(1)
    PARTS[options.part](options, RowFile(options.out))


if __name__ == "__main__":
    main()
