"""Count rows that an attack reconstructs behind a first layer with batch norm in training mode, and CPU seconds.

    python experiments/normalized_rows.py --layers 30x64 78x256 --batches 2 4 8 --attack auto

A client makes one step and uploads its weights and running statistics. A row counts if each value is right to a
hundredth. The control compares each batch with what was reconstructed from the next client's upload.
"""

import argparse
import copy
import itertools
import time
from typing import Any

import torch
import torch.nn.functional as F
from row_file import RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy import Observation, reconstruct
from fl_privacy.types import Certainty, LocalPlan, Reconstruction

RIGHT = 0.01  # largest error of a reconstructed value, whose range is 1
NUMBERS, WIDTH = 6, 5  # numeric features of a row, and categories of each further column


def drawn_rows(number: int, features: int, coded: bool, rng: torch.Generator) -> Tensor:
    """Draw rows (B, N) in [0, 1], ``coded`` as few numbers and many categories in one-hot encoding."""
    if not coded:
        return torch.rand(number, features, generator=rng)
    rows = torch.zeros(number, features)
    rows[:, :NUMBERS] = torch.rand(number, NUMBERS, generator=rng)
    for start in range(NUMBERS, features, WIDTH):
        chosen = start + torch.randint(min(WIDTH, features - start), (number,), generator=rng)
        rows[torch.arange(number), chosen] = 1
    return rows


def network(features: int, hidden: int, deep: bool, drop: float) -> nn.Sequential:
    widths = [features, hidden, hidden // 2, hidden // 4][: 4 if deep else 2]
    layers = list[nn.Module]()
    for given, made in itertools.pairwise(widths):
        layers += [nn.Linear(given, made), nn.BatchNorm1d(made), nn.ReLU(), nn.Dropout(drop)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 2))


def train(net: nn.Module, features: int, coded: bool, rng: torch.Generator) -> None:
    optimizer, truth = torch.optim.Adam(net.parameters(), lr=3e-3), torch.randn(features, generator=rng)
    for _ in range(60):
        rows = drawn_rows(64, features, coded, rng)
        optimizer.zero_grad()
        F.cross_entropy(net(rows), ((rows - 0.5) @ truth > 0).long()).backward()
        optimizer.step()


def observe(net: nn.Module, rows: Tensor, labels: Tensor, optimizer: Any) -> Observation:
    before, after = copy.deepcopy(net), copy.deepcopy(net)
    steps, lr = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer], 0.01 if optimizer == "sgd" else 1e-3
    F.cross_entropy(after(rows), labels).backward()
    steps(after.parameters(), lr=lr).step()
    plan = LocalPlan(shares="weights", lr=lr, steps=1, optimizer=optimizer)
    return Observation.of_update(before, after, plan, input_shape=rows.shape[1:], num_examples=len(rows))


def number_right(found: Reconstruction, rows: Tensor) -> int:
    if found.batch is None:
        return 0
    errors = (found.batch.inputs[:, None] - rows[None]).abs().amax(2)
    return int((errors.amin(0) < RIGHT).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=["30x64", "41x128", "78x256"], help="features x outputs")
    parser.add_argument("--batches", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--networks", nargs="+", default=["shallow", "deep"])
    parser.add_argument("--rows", nargs="+", default=["numbers", "categories"])
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adam"])
    parser.add_argument("--attack", default="auto")
    parser.add_argument("--victims", type=int, default=24)
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.set_num_threads(1)
    cells = [
        (layer, batch, kind, rows, trained)
        for layer in options.layers
        for batch in options.batches
        for kind in options.networks
        for rows in options.rows
        for trained in (False, True)
    ]
    for layer, batch, kind, rows, trained in cells:
        features, hidden = map(int, layer.split("x"))
        truths, found, seconds = list[Tensor](), list[Reconstruction](), 0.0
        for victim in range(options.victims):
            rng = torch.Generator().manual_seed(1000 + victim)
            torch.manual_seed(victim)
            net = network(features, hidden, kind == "deep", options.drop)
            if trained:
                train(net, features, rows == "categories", rng)
            truths.append(drawn_rows(batch, features, rows == "categories", rng))
            seen = observe(net, truths[-1], torch.randint(2, (batch,), generator=rng), options.optimizer)
            began = time.process_time()
            found.append(reconstruct(seen, options.attack))
            seconds += time.process_time() - began
        right = [number_right(one, own) for one, own in zip(found, truths, strict=True)]
        sure = [one.certainty is not Certainty.APPROXIMATE for one in found]
        figures = {
            "right": sum(right),
            "rows": batch * options.victims,
            "control": sum(number_right(one, own) for one, own in zip(found, truths[1:] + truths[:1], strict=True)),
            "certified": sum(sure),
            "certified_wrong": sum(known and number < batch for known, number in zip(sure, right, strict=True)),
            "cpu_seconds": seconds / options.victims,
        }
        key = {"layer": layer, "batch": batch, "network": kind, "kind": rows, "trained": trained}
        key |= {"drop": options.drop, "optimizer": options.optimizer, "attack": options.attack}
        print(kept.add(key, figures), flush=True)


if __name__ == "__main__":
    main()
