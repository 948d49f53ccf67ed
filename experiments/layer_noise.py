"""Accuracy when the gradient of one layer is noised, Refiner's Table 2.

    python experiments/layer_noise.py --steps 780 --seeds 3 --out experiments/rows/layer_noise

Plain steps of 0.01 on batches of 128 of CIFAR-10, of LeNet; of every gradient one layer gets Gaussian noise by
``defense=dp_noise defense.layers=[NUMBER]``. Every seed starts all layers from the same values and gives them the same
batches; without noise and with noise on all layers stand beside them.
"""

import argparse
from dataclasses import asdict
from itertools import product

import torch
from pruning_order import NETWORKS, RATE, accuracy as accuracy_of, batches, built, gradients_of, of_seeds, step
from row_file import Row, RowFile, takes_rows

from fl_privacy.data import Examples
from fl_privacy.defenses import Defense, dp_noise, none
from fl_privacy.measure import aggregate
from fl_privacy.rng import derive_seed
from fl_privacy.runs.build import build_dataset
from fl_privacy.runs.config import compose_run

LAYERS: dict[str, list[int | str] | None] = {"1": [1], "2": [2], "3": [3], "linear": ["classifier"], "all": None}


def cells(options: argparse.Namespace) -> list[Row]:
    """List what is trained: without noise, then each variance on each layer."""
    noised = [{"layer": layer, "variance": v} for v, layer in product(options.variances, options.layers)]
    every = [{"layer": "none", "variance": 0.0}, *noised]
    return [{"network": options.network, "steps": options.steps, **cell} for cell in every]


def defense_of(cell: Row) -> Defense:
    if cell["layer"] == "none":
        return none()
    return dp_noise(scale=cell["variance"] ** 0.5, layers=LAYERS[cell["layer"]])


def train(cell: Row, seed: int, train: Examples, test: Examples) -> float:
    """Train with noised gradients and return the accuracy at the end."""
    model, defense = built(cell["network"], seed), defense_of(cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number, batch in enumerate(batches(train, steps=cell["steps"], seed=seed)):
        step(model, optimizer, defense.apply(gradients_of(model, batch), seed=derive_seed(seed, "noise", number)))
    return accuracy_of(model, test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="tanh")
    parser.add_argument("--variances", nargs="+", type=float, default=[0.001, 0.01, 0.1])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--steps", type=int, default=7800, help="20 epochs, as published")
    parser.add_argument("--seeds", type=int, default=3)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset, kept = build_dataset(compose_run(["data=cifar10", "attack=none"]).data), RowFile(options.out)
    for seed, cell in product(range(options.seeds), cells(options)):
        if not kept.find({"what": "seed", **cell, "seed": seed}):
            found = train(cell, seed, dataset.train, dataset.test)
            print(cell, seed, found, flush=True)
            kept.add({"what": "seed", **cell, "seed": seed}, {"accuracy": found})
        plain = of_seeds(kept, {**cell, "layer": "none", "variance": 0.0}, "accuracy")
        own = of_seeds(kept, cell, "accuracy")
        figures = {"accuracy": list(own.values()), "lost": [plain[number] - own[number] for number in own]}
        summed = {name: aggregate(values) for name, values in figures.items()}
        kept.add({"what": "trained", **cell}, {name: each and asdict(each) for name, each in summed.items()})


if __name__ == "__main__":
    main()
