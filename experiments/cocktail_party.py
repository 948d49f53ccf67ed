"""``attack=cocktail_party`` behind a fully connected first layer: components, exact steps, a part of ``auto``.

    python experiments/cocktail_party.py --out experiments/rows/cocktail_party

Rows are kept as they come, and a run that was stopped goes on: activations, untrained and trained, batch sizes; then
noise and pruning on the update, where ``auto`` goes on from what is read.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from auto_table import train
from row_file import RowFile
from torch import Tensor, nn

from fl_privacy.attacks import AutoAttack, CocktailParty, ReconstructionAttack
from fl_privacy.data import Dataset, load_data
from fl_privacy.measure import evaluate_all
from fl_privacy.models import MLP, build_model
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, Certainty, LocalPlan, ModelState, Observation, Upload, VictimId

WIDTHS = [1024, 128]
FAILED = 0.0
"""PSNR in dB of an image that was not read at all."""


@dataclass(frozen=True)
class Case:
    """What is attacked; ``noise`` as a share of the root mean square of the first layer's gradient."""

    activation: str
    trained: bool
    batch: int
    noise: float = 0.0
    pruned: float = 0.0

    def changed(self, tensors: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Apply noise and pruning of this case to what the client sends."""
        std = self.noise * float(next(iter(tensors.values())).square().mean().sqrt())
        if std:
            tensors = {name: v + std * torch.randn(v.shape, generator=rng) for name, v in tensors.items()}
        if self.pruned:
            least = {n: v.abs().flatten().sort().values[int(self.pruned * v.numel())] for n, v in tensors.items()}
            tensors = {name: torch.where(v.abs() < least[name], 0.0, v) for name, v in tensors.items()}
        return tensors


def cases() -> Iterator[Case]:
    for activation in ("tanh", "relu"):
        for noise in (0.01, 0.1, 1.0):
            yield Case(activation, False, 8, noise=noise)
        for pruned in (0.5, 0.9):
            yield Case(activation, False, 8, pruned=pruned)
    for batch in (8, 32, 64, 128):
        for trained in (False, True):
            for activation in ("sigmoid", "tanh", "relu"):
                yield Case(activation, trained, batch)


def network(case: Case, data: Dataset, options: argparse.Namespace) -> nn.Module:
    settings = {"widths": WIDTHS, "mean": [0.5], "std": [0.25], "activation": case.activation}
    channels, size, _ = data.train.input_shape
    model = build_model(MLP, seed=options.seed, in_channels=channels, image_size=size, num_classes=10, **settings)
    if case.trained:
        train(model, data, options)
    return model.eval()


def victims(case: Case, data: Dataset, options: argparse.Namespace) -> tuple[list[Observation], list[Batch]]:
    model = network(case, data, options)
    sent, rng = ModelState.of(model), torch.Generator().manual_seed(options.seed)
    order, seen = torch.randperm(len(data.test), generator=rng), []
    truths = [data.test.batch(order[v * case.batch : (v + 1) * case.batch]) for v in range(options.victims)]
    for number, truth in enumerate(truths):
        tensors = case.changed(loss_gradients(model, sent, truth).gradients, rng)
        seen.append(
            Observation(
                id=VictimId(0, 0, number),
                model=model,
                sent=sent,
                upload=Upload(tensors=tensors, num_examples=case.batch),
                plan=LocalPlan(),
                input_shape=data.train.input_shape,
                num_classes=10,
            )
        )
    return seen, truths


def figures(attack: ReconstructionAttack, name: str, seen: list[Observation], truths: list[Batch]) -> dict[str, Any]:
    began = time.process_time()
    found = attack(seen, seed=0)
    took = (time.process_time() - began) / len(seen)
    images = [image for score in evaluate_all(found, truths) for image in score.images]
    values = [min(image.values["psnr"], 200.0) if image.values else FAILED for image in images]
    sure = {kind: sum(one.certainty is kind for one in found) / len(found) for kind in Certainty}
    told = {"psnr": sum(values) / len(values), "worst": min(values)}
    told |= {"consistent": sure[Certainty.CONSISTENT], "proven": sure[Certainty.PROVEN], "seconds": took}
    return {f"{name} {key}": value for key, value in told.items()}


def attacked(case: Case, data: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    seen, truths = victims(case, data, options)
    found = figures(CocktailParty(steps=0), "components", seen, truths)
    found = {key: found[key] for key in ("components psnr", "components seconds")}
    found |= figures(CocktailParty(), "exact", seen, truths)
    if case.noise or case.pruned:
        last = figures(AutoAttack(evaluations=options.evaluations), "auto", seen, truths)
        found |= {key: last[key] for key in ("auto psnr", "auto seconds")}
    return {"victims": len(seen), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/cocktail_party"))
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--victims", type=int, default=2)
    parser.add_argument("--evaluations", type=int, default=200, help="of auto, for each victim")
    parser.add_argument("--training-steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600, help="of wall clock, after which no row is begun")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, data, began = RowFile(options.out), load_data(options.data), time.monotonic()
    for case in cases():
        key = {**asdict(case), "data": options.data}
        if rows.find(key) is None and time.monotonic() - began < 60 * options.minutes:
            print(rows.add(key, attacked(case, data, options)), flush=True)


if __name__ == "__main__":
    main()
