"""How much of rows of Adult is read from one update: cells and rows, beside guesses without it, and CPU seconds.

TabLeak's network (two hidden layers of 100, untrained) and data (rows that lack nothing, all values standardized). The
parts: ``cells`` by ``attack=tableak`` with the labels known, as in the paper; ``authors`` by the authors' public
program, whose checkout ``--program`` names, on the same gradients; ``noise`` on the gradient; ``steps`` of FedAvg;
``exact`` by ``attack=exact``, which is to be right wherever it says proven; ``models`` that are not the paper's.
A row is a batch; those that are there are not computed again.

python experiments/tables.py cells --batches 20 --out experiments/rows/tables_cells
python experiments/tables.py authors --program CHECKOUT --sizes 8 32 --batches 2 --out experiments/rows/tables_authors
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from row_file import Row, RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy.attacks import ExactInversion, tableak
from fl_privacy.data import Dataset, TableExamples, load_table
from fl_privacy.metrics.tables import assign, control_cells, right_cells, usual_row
from fl_privacy.models import FlTabular, TableLogistic, TableMLP, TableResNet
from fl_privacy.schema import Column, Schema
from fl_privacy.types import Certainty, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
NOISES = (1e-3, 1e-2, 1e-1)
STEPS = (1, 5, 10)
RATE = 0.01
PUBLIC = 5000
"""Rows of the test split, of which no batch is."""

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "table_mlp": TableMLP, "logistic": TableLogistic, "fl_tabular": FlTabular, "resnet_table": TableResNet
}  # fmt: skip


@cache
def adult() -> Dataset:
    """As TabLeak has it."""
    return load_table("adult", missing="drop", standardize="all")


def observe(
    size: int,
    batch: int,
    *,
    noise: float = 0.0,
    steps: int = 1,
    model: str = "table_mlp",
    known: bool = True,
    data: Dataset | None = None,
) -> tuple[Observation, Tensor]:
    """An update of so many rows, and their cells (B, C)."""
    examples, rng = (data or adult()).train, torch.Generator().manual_seed(1000 * size + batch)
    assert isinstance(examples, TableExamples)
    rows = examples.batch(torch.randint(len(examples), (size,), generator=rng))
    torch.manual_seed(batch)
    network = MODELS[model](schema=examples.schema, num_classes=2)
    sent = ModelState.of(network)
    if steps == 1:
        loss = nn.functional.cross_entropy(network(rows.inputs), rows.labels)
        tensors = dict(zip(sent.parameters, torch.autograd.grad(loss, list(network.parameters())), strict=True))
        plan = LocalPlan()
    else:
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(rows.inputs), rows.labels).backward()
            optimizer.step()
        tensors = {name: p.detach() - sent.parameters[name] for name, p in network.named_parameters()}
        plan = LocalPlan(shares="delta", lr=RATE, steps=steps)
    if noise:
        tensors = {name: t + noise * torch.randn(t.shape, generator=rng) for name, t in tensors.items()}
    observation = Observation(
        id=VictimId(0, 0, batch),
        model=network,
        sent=sent,
        upload=Upload(tensors=tensors, num_examples=size),
        plan=plan,
        input_shape=examples.input_shape,
        num_classes=2,
        knowledge=Knowledge(labels=rows.labels if known else None),
    )
    return observation, examples.schema.cells(rows.inputs)


def judged(guess: Tensor | None, truth: Tensor, data: Dataset | None = None) -> Row:
    """Shares of cells and rows of ``truth`` (B, C) that a guess (B, F) has right, beside guesses without the update."""
    test = (data or adult()).test
    assert isinstance(test, TableExamples)
    schema, public = test.schema, test.schema.cells(test.inputs[:PUBLIC])
    usual = right_cells(schema, usual_row(public, schema), truth).double().mean()
    band = control_cells(public, truth, schema)
    figures = {"usual_cells": float(usual), "band_cells": float(band.mean())}
    if guess is None:
        return {"cells": 0.0, "rows": 0.0, "read": 0.0, **figures}
    cells = schema.cells(guess)
    right = right_cells(schema, cells[assign(schema, cells, truth)], truth)
    read = (right.double().mean(1) > band + 1e-9).double().mean()
    rows = right.all(1).double().mean()
    return {"cells": float(right.double().mean()), "rows": float(rows), "read": float(read), **figures}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What ``work`` returns, and its CPU seconds."""
    began = time.process_time()
    found = work()
    return found, time.process_time() - began


def by_tableak(key: Row, **settings: Any) -> Row:
    """One batch by ``attack=tableak``."""
    observation, truth = observe(key["size"], key["batch"], **settings)
    (found,), seconds = timed(lambda: tableak()([observation], seed=0))
    return judged(None if found.batch is None else found.batch.inputs, truth) | {"cpu_seconds": seconds}


def by_exact(key: Row) -> Row:
    """One batch by ``attack=exact``: whether it says proven, and whether every cell is then right to its last digit."""
    observation, truth = observe(key["size"], key["batch"], known=False)
    (found,), seconds = timed(lambda: ExactInversion(rounds=20)([observation], seed=0))
    proven = found.certainty is Certainty.PROVEN
    figures = judged(None if found.batch is None else found.batch.inputs, truth)
    return {"proven": proven, "wrong": proven and figures["rows"] < 1, **figures, "cpu_seconds": seconds}


class Program:
    """The authors' public program, as its example calls it, and its data as this package has data."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder.resolve()))
        before = Path.cwd()
        os.chdir(folder)  # its data sets are read from there
        theirs, datasets, models = map(
            importlib.import_module, ("attacks.gradient_inversion_attack", "datasets", "models")
        )
        plain = theirs.continuous_sigmoid_bound
        # on PyTorch above 1.7 a leaf must not be changed in place: it is given a copy
        theirs.continuous_sigmoid_bound = lambda x, dataset: plain(x * 1.0, dataset=dataset)
        self.attack, self.network, self.data = theirs.invert_grad, models.FullyConnected, datasets.ADULT()
        os.chdir(before)
        raw = torch.cat([self.data.Xtrain, self.data.Xtest])
        self.data.standardize()
        self.schema = Schema(tuple(self._column(name, *about, raw) for name, about in self._columns()))
        names = ("<=50K", ">50K")
        self.train, self.test = (
            TableExamples(inputs=x, labels=y, class_names=names, schema=self.schema)
            for x, y in ((self.data.Xtrain, self.data.ytrain), (self.data.Xtest, self.data.ytest))
        )

    def _columns(self) -> Any:
        return self.data.train_feature_index_map.items()

    def _column(self, name: str, kind: str, places: Sequence[int], raw: Tensor) -> Column:
        shift, scale = (tuple(values[places].tolist()) for values in (self.data.mean, self.data.std))
        if kind == "cat":
            return Column(name=name, categories=tuple(self.data.train_features[name]), shift=shift, scale=scale)
        own = raw[:, places]
        return Column(name=name, shift=shift, scale=scale, low=float(own.min()), high=float(own.max()))

    def __call__(self, observation: Observation, rows: Tensor) -> Tensor:
        """(B, F) what it makes of an update of ``rows``, of which it takes the shape alone."""
        network = self.network(rows.shape[1], [100, 100, 2])
        network.load_state_dict(dict(zip(network.state_dict(), observation.sent.parameters.values(), strict=True)))
        found: Tensor = self.attack(
            net=network,
            training_criterion=nn.CrossEntropyLoss(),
            true_grad=list(observation.upload.tensors.values()),
            true_label=observation.knowledge.labels,
            true_data=torch.zeros_like(rows),
            reconstruction_loss="cosine_sim",
            dataset=self.data,
            max_iterations=1500,
            post_selection=30,
            softmax_trick=True,
            sigmoid_trick=True,
            pooling="median+softmax",
        )
        return found.detach()


def beside(key: Row, program: Program, *, noise: float) -> Row:
    """One batch by the authors' program and by ``attack=tableak``, one after the other on the same gradient."""
    data = Dataset(program.train, program.test, "adult of the program")
    observation, truth = observe(key["size"], key["batch"], noise=noise, data=data)
    torch.manual_seed(key["batch"])
    theirs, slow = timed(lambda: program(observation, program.schema.encode(truth)))
    (ours,), fast = timed(lambda: tableak()([observation], seed=0))
    assert ours.batch is not None
    figures = judged(ours.batch.inputs, truth, data) | {"cpu_seconds": fast}
    other = judged(theirs, truth, data)
    return figures | {"their_cells": other["cells"], "their_rows": other["rows"], "their_cpu_seconds": slow}


def todo(part: str, options: argparse.Namespace) -> list[tuple[Row, Mapping[str, Any]]]:
    """Keys of rows, and the settings of their updates; batch by batch, so that what is there is of all sizes."""
    sizes, batches = options.sizes or SIZES, range(options.batches)
    if part == "authors":
        noises = options.noises or [0.0]
        return [({"size": b, "batch": k, "noise": n}, {"noise": n}) for k in batches for b in sizes for n in noises]
    if part == "noise":
        return [({"size": b, "batch": k, "noise": n}, {"noise": n}) for k in batches for b in sizes for n in NOISES]
    if part == "steps":
        return [({"size": b, "batch": k, "steps": s}, {"steps": s}) for k in batches for b in sizes for s in STEPS]
    if part == "models":
        return [({"size": b, "batch": k, "model": m}, {"model": m}) for k in batches for b in sizes for m in MODELS]
    return [({"size": size, "batch": batch}, {}) for batch in batches for size in sizes]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cells", "authors", "noise", "steps", "exact", "models"))
    parser.add_argument("--sizes", type=int, nargs="+", help="rows of a batch")
    parser.add_argument("--batches", type=int, default=20, help="of each size")
    parser.add_argument("--program", type=Path, help="checkout of the authors' program, for the part authors")
    parser.add_argument("--noises", type=float, nargs="+", help="deviations, for the part authors")
    takes_rows(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    program = Program(options.program) if options.part == "authors" else None
    for asked, settings in todo(options.part, options):
        key = {"part": options.part, **asked}
        if kept.find(key) is not None:
            continue
        if program is not None:
            row = beside(key, program, **settings)
        else:
            row = by_exact(key) if options.part == "exact" else by_tableak(key, **settings)
        print(kept.add(key, row), flush=True)


if __name__ == "__main__":
    main()
