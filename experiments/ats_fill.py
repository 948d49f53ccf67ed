"""What ATS's privacy score sees of a shift: the image that moved, or the black that it left (ATS, Figure 15).

    fl-privacy search-policies data=cifar10 model=lenet policies=1500 out=runs/ats_scored
    python experiments/ats_fill.py runs/ats_scored/SEARCH --out experiments/rows/ats_fill

Scores test images behind the search's semi-trained model, as they are, under operations, and under shifts whose vacated
area is filled with black as the operations have it, with the gray that normalization takes to zero, with white, and
with the noise that the way to the image starts from; beside them images that are nothing but black or gray. The score
is the mean similarity of gradients on the way (lower counts as more private): of the whole gradient as in the paper's
Equation 5, and the mean over its tensors as in the authors' program. `--fresh` has the network before any training.
`--tables` keeps instead how near an image of nothing but the mean color is to what policies leave, by the operations of
the paper's table and by those of its authors' program.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from ats_correlation import images_of_all_classes
from omegaconf import DictConfig, OmegaConf
from row_file import RowFile, takes_rows
from torch import Tensor

from fl_privacy.data import Examples
from fl_privacy.data.transformations import Policy
from fl_privacy.defenses.policy_search.scores import GradientSimilarity, PrivacyPlan, transformed_by
from fl_privacy.measure.images import psnr
from fl_privacy.measure.intervals import aggregate
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_dataset, build_network
from fl_privacy.runs.policy_search import SEMI_TRAINED
from fl_privacy.runs.weights import load_weights
from fl_privacy.types import Batch, ModelState

SHIFTS, OTHERS = ("3", "21", "43", "48"), ("14", "15", "17")
GRAY = 0.5


def cases(images: Tensor, start: Tensor, seed: int) -> dict[tuple[str, str], Tensor]:
    """Return what is scored, by operation and filling: (N, C, H, W) each."""
    found = {("none", ""): images}
    for name in (*SHIFTS, *OTHERS):
        policy = Policy.parse(name, "paper")
        found[name, "black" if name in SHIFTS else ""] = moved = transformed_by(images, policy, seed)
        if name in SHIFTS:
            vacated = transformed_by(torch.ones_like(images), policy, seed) == 0
            for filling, values in (("gray", GRAY), ("white", 1.0)):
                found[name, filling] = torch.where(vacated, torch.full_like(moved, values), moved)
            found[name, "noise"] = torch.where(vacated, start, moved)
    found["nothing", "black"], found["nothing", "gray"] = torch.zeros_like(images), torch.full_like(images, GRAY)
    return found


def similarity_of(config: DictConfig, folder: Path, *, fresh: bool, images: int) -> tuple[GradientSimilarity, Batch]:
    """Build the model of a search and take test images of all classes."""
    dataset = build_dataset(config["data"])
    model = build_network(config["model"], dataset, seed=config["seed"])
    state = ModelState.of(model)
    if not fresh:
        state = load_weights(folder / SEMI_TRAINED, state)
    assert isinstance(dataset.test, Examples)
    return GradientSimilarity(model, state, dataset.test.input_shape), images_of_all_classes(dataset.test, images)


def plain_colors(images: Tensor, seed: int, kept: RowFile) -> None:
    """Keep how near a plain image of the mean color comes to what policies leave, by both tables of operations."""
    for table in ("paper", "code"):
        for name in ("21-3-16", "13-43-18"):
            moved = transformed_by(images, Policy.parse(name, table), seed)
            found = aggregate(psnr(moved.mean((2, 3), keepdim=True).expand_as(moved), moved).tolist())
            assert found is not None
            kept.add({"table": table, "policy": name}, {"psnr": asdict(found)})
            print(f"{name}, {table}: {found.mean:.1f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", type=Path)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--fresh", action="store_true", help="the untrained network")
    parser.add_argument(
        "--tables", action="store_true", help="only what a plain image has under both tables of operations"
    )
    takes_rows(parser)
    options = parser.parse_args()
    config = OmegaConf.load(options.search / "config.yaml")
    assert isinstance(config, DictConfig)
    kept = RowFile(options.out)
    similarity, batch = similarity_of(config, options.search, fresh=options.fresh, images=options.images)
    if options.tables:
        plain_colors(batch.inputs, config["seed"], kept)
        return
    start = torch.rand(batch.inputs.shape, generator=derive_generator(config["seed"], "search", "start"))
    behind = {"model": config["choices"]["model"], "trained": "fresh" if options.fresh else "semi-trained"}
    plans = {"whole": PrivacyPlan.named("paper"), "tensors": PrivacyPlan.named("code")}
    for (operation, filling), goals in cases(batch.inputs, start, config["seed"]).items():
        key = {**behind, "operation": operation, "filling": filling}
        if kept.find(key):
            continue
        figures = {}
        for name, plan in plans.items():
            products = similarity(start, goals, batch.labels, plan.shares())
            found = aggregate(plan.area(products.cosine(plan.cosine).double()).tolist())
            assert found is not None
            figures[name] = asdict(found)
        kept.add(key, figures)
        told = ", ".join(f"{name} {figure['mean']:.3f}" for name, figure in figures.items())
        print(f"{operation} {filling}: {told}", flush=True)


if __name__ == "__main__":
    main()
