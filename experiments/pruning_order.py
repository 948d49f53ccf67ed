"""Which elements of a gradient to keep, Refiner's Tables 1 and 11: by weight, gradient, their product, and others.

    python experiments/pruning_order.py trained --rates 0.2 0.8 --seeds 3 --out experiments/rows/pruning_order
    python experiments/pruning_order.py trained --network ReLU --by gradient product --steps 1950 --out ...
    python experiments/pruning_order.py trained --by product integrated_gradients shapley --steps 780 --out ...
    python experiments/pruning_order.py kept --out experiments/rows/pruning_order

``trained``: accuracy on the test images after plain steps of 0.01 on batches of 128, where of every gradient the share
``--rates`` is pruned, the smallest first; means over seeds, each of which starts all criteria from the same values and
gives them the same batches. Seconds are of the CPU, of a training without its test. ``kept``: along an unpruned
training, which share of a batch gradient's squared norm each criterion keeps - to first order what a small step lowers
the loss by, in parts of what it would unpruned - and which share of the sum of |weight x gradient|, which is what the
paper's argument weighs.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product

import torch
import torch.nn.functional as F
from row_file import Row, RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy.data import Examples
from fl_privacy.defenses import ClientState, LocalStep
from fl_privacy.defenses._pruning import OF_STEPS, keep_largest, step_scores
from fl_privacy.effects import Scope
from fl_privacy.measure import aggregate
from fl_privacy.models import LeNet
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_dataset
from fl_privacy.runs.config import compose_run
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

CRITERIA = ("weight", "gradient", "product")
COSTLY = ("integrated_gradients", "shapley")
"""Criteria that ask for many passes a step."""
NETWORKS: Mapping[str, tuple[dict[str, object], float, Scope]] = {
    "tanh": ({"activation": "tanh", "mean": [0.5], "std": [0.25]}, 0.0, "layer"),
    "tanh, ranked over all layers": ({"activation": "tanh", "mean": [0.5], "std": [0.25]}, 0.0, "global"),
    "tanh, momentum": ({"activation": "tanh", "mean": [0.5], "std": [0.25]}, 0.9, "layer"),
    "tanh, values from U(-0.5, 0.5)": (
        {"activation": "tanh", "mean": [0.5], "std": [0.25], "init": "uniform_0.5"},
        0.0,
        "layer",
    ),
    "ReLU": ({"activation": "relu"}, 0.0, "layer"),
    "ReLU, momentum": ({"activation": "relu"}, 0.9, "layer"),
    "sigmoid, momentum": ({"activation": "sigmoid"}, 0.9, "layer"),
    "sigmoid, values from U(-0.5, 0.5)": ({"activation": "sigmoid", "init": "uniform_0.5"}, 0.0, "layer"),
}
"""By name: settings of the model, momentum, and among which elements the smallest are looked for."""

RATE, BATCH, LOOKED_AT = 0.01, 128, (0, 390, 1950, 7800)


def built(network: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    settings = NETWORKS[network][0]
    return LeNet(in_channels=3, image_size=32, num_classes=10, **settings)  # type: ignore[arg-type]


def batches(train: Examples, *, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through the images in a new order each epoch; what does not fill a batch is left out."""
    rng, each = torch.Generator().manual_seed(seed), len(train) // BATCH
    for step in range(steps):
        if step % each == 0:
            order = torch.randperm(len(train), generator=rng)
        chosen = order[step % each * BATCH : (step % each + 1) * BATCH]
        yield train.images[chosen].float() / 255, train.labels[chosen]


def scores(by: str, gradients: Tensors, at: LocalStep, samples: int | None = None) -> Tensors:
    """Compute what a criterion ranks elements by."""
    if by in OF_STEPS:
        return step_scores(by, gradients, at, samples)  # type: ignore[arg-type]
    return {name: g.abs() for name, g in gradients.items()}


def local_step(model: nn.Module, batch: tuple[Tensor, Tensor], rng: torch.Generator) -> LocalStep:
    return LocalStep(model, ModelState.of(model), Batch(*batch), LocalPlan(), ClientState(), rng)


def gradients_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensors:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), parameters)
    return dict(zip(names, found, strict=True))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Tensors) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, test: Examples) -> float:
    hits = [
        (model(test.images[k : k + 1000].float() / 255).argmax(1) == test.labels[k : k + 1000]).sum()
        for k in range(0, len(test), 1000)
    ]
    return float(torch.stack(hits).sum() / len(test))


def train(cell: Row, seed: int, train: Examples, test: Examples) -> Row:
    """Train with pruned gradients and return the accuracy at the end, and the seconds that it took."""
    model, (_, momentum, scope) = built(cell["network"], seed), NETWORKS[cell["network"]]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    rng, started = derive_generator(seed, "pruning"), time.process_time()
    for batch in batches(train, steps=cell["steps"], seed=seed):
        gradients = gradients_of(model, batch)
        if cell["rate"]:
            found = scores(cell["by"], gradients, local_step(model, batch, rng), cell.get("samples"))
            masks = keep_largest(found, drop=cell["rate"], scope=scope)
            gradients = {name: g * masks[name] for name, g in gradients.items()}
        step(model, optimizer, gradients)
    return {"seconds": time.process_time() - started, "accuracy": accuracy(model, test)}


def trained(options: argparse.Namespace, data: tuple[Examples, Examples], kept: RowFile) -> None:
    """Keep the accuracy of every cell: of each seed, and over the seeds so far."""
    cells = list(product(options.network, options.rates, options.by))
    for seed, (network, rate, by) in product(range(options.seeds), cells):
        cell: Row = {"network": network, "by": by if rate else "none", "rate": rate, "steps": options.steps}
        if by in COSTLY:
            cell["samples"] = options.samples
        if not kept.find({"what": "seed", **cell, "seed": seed}):
            found = train(cell, seed, *data)
            print(cell, seed, found, flush=True)
            kept.add({"what": "seed", **cell, "seed": seed}, found)
        figures = {name: over(kept, cell, name) for name in ("accuracy", "seconds")}
        kept.add({"what": "trained", **cell}, {**figures, "to_product": to_product(kept, cell)})
    for network, rate in product(options.network, options.rates):
        pair: Row = {"network": network, "rate": rate, "steps": options.steps}
        one, other = (of_seeds(kept, {**pair, "by": by}, "accuracy") for by in ("gradient", "product"))
        apart = [one[seed] - other[seed] for seed in one if seed in other]
        if apart and (found := aggregate(apart)):
            kept.add({"what": "difference", **pair}, {"accuracy": asdict(found)})


def over(kept: RowFile, cell: Row, figure: str) -> Row | None:
    """Sum up a figure over the seeds so far."""
    found = aggregate(list(of_seeds(kept, cell, figure).values()))
    return asdict(found) if found else None


def to_product(kept: RowFile, cell: Row) -> Row | None:
    """Compute how many times the seconds of the product a criterion takes, over the seeds that have both."""
    plain = {name: cell[name] for name in ("network", "rate", "steps")} | {"by": "product"}
    own, other = (of_seeds(kept, each, "seconds") for each in (cell, plain))
    found = aggregate([own[seed] / other[seed] for seed in own if seed in other])
    return asdict(found) if found else None


def of_seeds(kept: RowFile, cell: Row, figure: str) -> dict[int, float]:
    """Look up a figure of each seed that has it."""
    wanted = {"what": "seed", **cell}
    return {row["seed"]: row[figure] for row in kept.rows if wanted.items() <= row.items() and figure in row}


def shares(model: nn.Module, batch: tuple[Tensor, Tensor], *, by: str, rate: float) -> tuple[float, float]:
    """Compute what a criterion keeps of the squared norm of the gradient, and of the sum of |weight x gradient|."""
    gradients, at = gradients_of(model, batch), local_step(model, batch, torch.Generator())
    masks = keep_largest(scores(by, gradients, at), drop=rate, scope="layer")
    parts = []
    for whole in ({n: g**2 for n, g in gradients.items()}, scores("product", gradients, at)):
        left = sum(float((each * masks[name]).sum()) for name, each in whole.items())
        parts.append(left / sum(float(each.sum()) for each in whole.values()))
    return parts[0], parts[1]


def kept_shares(options: argparse.Namespace, data: tuple[Examples, Examples], kept: RowFile) -> None:
    """Train without pruning and keep the shares that each criterion would have kept on the way."""
    for network in options.network:
        model = built(network, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=NETWORKS[network][1])
        looked = [step for step in LOOKED_AT if step <= options.steps]
        for number, batch in enumerate(batches(data[0], steps=max(looked) + 1, seed=0)):
            if number in looked:
                some = list(batches(data[0], steps=16, seed=1))
                for rate, by in product(options.rates, options.by):
                    found = [shares(model, each, by=by, rate=rate) for each in some]
                    squared, own = (aggregate([pair[k] for pair in found]) for k in (0, 1))
                    key = {"what": "kept", "network": network, "by": by, "rate": rate, "steps": number}
                    told = {"of_squared_norm": squared and asdict(squared), "of_products": own and asdict(own)}
                    kept.add(key, told)
                    print(key, squared and squared.mean, own and own.mean, flush=True)
            step(model, optimizer, gradients_of(model, batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trained", "kept"))
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=["tanh"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.8])
    parser.add_argument("--by", nargs="+", choices=CRITERIA + COSTLY, default=CRITERIA)
    parser.add_argument("--samples", type=int, default=5, help="points, or orders of neurons, of a costly criterion")
    parser.add_argument("--steps", type=int, default=7800, help="20 epochs, as published")
    parser.add_argument("--seeds", type=int, default=3)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = build_dataset(compose_run(["data=cifar10", "attack=none"]).data)
    run = trained if options.what == "trained" else kept_shares
    run(options, (dataset.train, dataset.test), RowFile(options.out))


if __name__ == "__main__":
    main()
