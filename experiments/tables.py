"""How much of rows of Adult is read from one update: cells and rows, beside guesses without it, and CPU seconds.

TabLeak's network (two hidden layers of 100, untrained) and data (rows that lack nothing, all values standardized). The
parts: ``cells`` by ``attack=tableak`` with the labels known, as in the paper; ``authors`` by the authors' public
program, whose checkout ``--program`` names, on the same gradients; ``noise`` on the gradient; ``epochs`` of FedAvg in
minibatches, as in the paper; ``steps`` of FedAvg on the whole batch; ``exact`` by ``attack=exact``, which is to be
right wherever it says proven; ``auto`` by the default attack, labels not known; ``models`` that are not the paper's.
A row is a batch; those that are there are not computed again. The first fourteen batches have a network each and are
timed; of the others ten share one, as the paper's fifty do, and are attacked at once.

python experiments/tables.py cells --batches 20 --out experiments/rows/tables_cells
python experiments/tables.py authors --program CHECKOUT --sizes 8 32 --batches 2 --out experiments/rows/tables_authors
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from row_file import Row, RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy.attacks import AutoAttack, ExactInversion, ReconstructionAttack, tableak
from fl_privacy.data import Dataset, TableExamples, load_table
from fl_privacy.measure.tables import assign, control_cells, right_cells, usual_row
from fl_privacy.models import FlTabular, TableLogistic, TableMLP, TableResNet
from fl_privacy.types import (
    Batch,
    Certainty,
    Knowledge,
    LocalPlan,
    ModelState,
    Observation,
    Reconstruction,
    Upload,
    VictimId,
)
from fl_privacy.types.schema import Column, Schema

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
NOISES = (1e-3, 1e-2, 1e-1)
STEPS = (1, 5, 10)
EPOCHS = (1, 5, 10)
CLIENT, MINIBATCHES = 32, (32, 16, 8)
"""Rows of a client that trains in epochs, and of its minibatches, which follow each other in the order of the rows."""
RATE = 0.01
GRADIENT = LocalPlan()
ALONE, TOGETHER = 14, 10
"""So many batches have a network of their own; of the others so many share one."""
PUBLIC = 5000
"""Rows of the test split, of which no batch is."""

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "table_mlp": TableMLP, "logistic": TableLogistic, "fl_tabular": FlTabular, "resnet_table": TableResNet
}  # fmt: skip


@cache
def adult() -> Dataset:
    """Load Adult as TabLeak prepares it."""
    return load_table("adult", missing="drop", standardize="all")


def network_of(batch: int) -> int:
    """Return the seed of the network behind a batch."""
    return batch if batch < ALONE else batch - (batch - ALONE) % TOGETHER


@cache
def network(model: str, seed: int, schema: Schema) -> nn.Module:
    """Build an untrained network."""
    torch.manual_seed(seed)
    return MODELS[model](schema=schema, num_classes=2)


def gradient(net: nn.Module, rows: Batch) -> dict[str, Tensor]:
    """Compute the gradient of the mean loss of ``rows`` by each parameter."""
    names, parameters = zip(*net.named_parameters(), strict=True)
    loss = nn.functional.cross_entropy(net(rows.inputs), rows.labels)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def change(net: nn.Module, rows: Batch, plan: LocalPlan) -> dict[str, Tensor]:
    """Compute what local training by ``plan`` adds to each parameter, minibatches in the order of the rows."""
    trained, size = deepcopy(net), plan.batch_size or len(rows.labels)
    parts = [Batch(*pair) for pair in zip(rows.inputs.split(size), rows.labels.split(size), strict=True)]
    optimizer = torch.optim.SGD(trained.parameters(), lr=plan.lr)
    for part in parts * (plan.epochs or plan.steps or 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(part.inputs), part.labels).backward()
        optimizer.step()
    sent = dict(net.named_parameters())
    return {name: (after - sent[name]).detach() for name, after in trained.named_parameters()}


def observe(
    size: int,
    batch: int,
    *,
    noise: float = 0.0,
    plan: LocalPlan = GRADIENT,
    model: str = "table_mlp",
    known: bool = True,
    data: Dataset | None = None,
) -> tuple[Observation, Tensor]:
    """Observe an update of ``size`` rows; return their cells (B, C) too."""
    examples, rng = (data or adult()).train, torch.Generator().manual_seed(1000 * size + batch)
    assert isinstance(examples, TableExamples)
    rows = examples.batch(torch.randint(len(examples), (size,), generator=rng))
    net = network(model, network_of(batch), examples.schema)
    tensors = gradient(net, rows) if plan.shares == "gradient" else change(net, rows, plan)
    if noise:
        tensors = {name: t + noise * torch.randn(t.shape, generator=rng) for name, t in tensors.items()}
    observation = Observation(
        id=VictimId(0, 0, batch),
        model=net,
        sent=ModelState.of(net),
        upload=Upload(tensors=tensors, num_examples=size),
        plan=plan,
        input_shape=examples.input_shape,
        num_classes=2,
        knowledge=Knowledge(labels=rows.labels if known else None),
    )
    return observation, examples.schema.cells(rows.inputs)


def judged(guess: Tensor | None, truth: Tensor, data: Dataset | None = None) -> Row:
    """Compute the shares of cells and rows of ``truth`` that are right, beside guesses without the update."""
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
    """Run ``work`` and return its result and CPU seconds."""
    began = time.process_time()
    found = work()
    return found, time.process_time() - began


def told(found: Reconstruction, truth: Tensor) -> Row:
    """Judge what an attack found."""
    return judged(None if found.batch is None else found.batch.inputs, truth)


def together(attack: ReconstructionAttack, keys: Sequence[Row], **settings: Any) -> list[Row]:
    """Attack batches of one network at once; a batch that is attacked alone is timed."""
    seen = [observe(key["size"], key["batch"], **settings) for key in keys]
    found, seconds = timed(lambda: attack([observation for observation, _ in seen], seed=0))
    rows = [told(one, truth) for one, (_, truth) in zip(found, seen, strict=True)]
    return [row | {"cpu_seconds": seconds} for row in rows] if len(rows) == 1 else rows


def by_auto(key: Row) -> Row:
    """Attack one batch by ``attack=auto``, labels not known."""
    observation, truth = observe(key["size"], key["batch"], known=False)
    (found,), seconds = timed(lambda: AutoAttack()([observation], seed=0))
    return {"proven": found.certainty is Certainty.PROVEN, **told(found, truth), "cpu_seconds": seconds}


def by_exact(key: Row) -> Row:
    """Attack one batch by ``attack=exact``, and check that a proven one is right to its last digit."""
    observation, truth = observe(key["size"], key["batch"], known=False)
    (found,), seconds = timed(lambda: ExactInversion(rounds=20)([observation], seed=0))
    proven = found.certainty is Certainty.PROVEN
    figures = told(found, truth)
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
        """Run the authors' program on an update of ``rows``, whose shape alone it uses; return its guess (B, F)."""
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
    """Attack one batch by the authors' program and by ``attack=tableak``, on the same gradient."""
    data = Dataset(program.train, program.test, "adult of the program")
    observation, truth = observe(key["size"], key["batch"], noise=noise, data=data)
    torch.manual_seed(key["batch"])
    theirs, slow = timed(lambda: program(observation, program.schema.encode(truth)))
    (ours,), fast = timed(lambda: tableak()([observation], seed=0))
    assert ours.batch is not None
    figures = judged(ours.batch.inputs, truth, data) | {"cpu_seconds": fast}
    other = judged(theirs, truth, data)
    return figures | {"their_cells": other["cells"], "their_rows": other["rows"], "their_cpu_seconds": slow}


def plans(part: str) -> list[tuple[Row, LocalPlan]]:
    """List fields of rows and plans of clients that take several local steps."""
    if part == "steps":
        return [({"steps": n}, LocalPlan(shares="delta", lr=RATE, steps=n) if n > 1 else GRADIENT) for n in STEPS]
    return [
        ({"minibatch": m, "epochs": n}, LocalPlan(shares="delta", lr=RATE, epochs=n, batch_size=m))
        for n in EPOCHS
        for m in MINIBATCHES
    ]


def kinds(part: str, options: argparse.Namespace) -> list[tuple[Row, Mapping[str, Any]]]:
    """List fields that all rows of a kind have, and settings of their updates."""
    sizes: Sequence[int] = options.sizes or ((CLIENT,) if part == "epochs" else SIZES)
    found: Sequence[tuple[Row, Mapping[str, Any]]] = [({}, {})]
    if part in ("authors", "noise"):
        noises = options.noises or ([0.0] if part == "authors" else NOISES)
        found = [({"noise": noise}, {"noise": noise}) for noise in noises]
    elif part in ("steps", "epochs"):
        found = [(fields, {"plan": plan}) for fields, plan in plans(part)]
    elif part == "models":
        found = [({"model": model}, {"model": model}) for model in MODELS]
    return [({"size": size, **fields}, settings) for size in sizes for fields, settings in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cells", "authors", "noise", "steps", "epochs", "exact", "auto", "models"))
    parser.add_argument("--sizes", type=int, nargs="+", help="rows of a batch")
    parser.add_argument("--batches", type=int, default=20, help="of each size")
    parser.add_argument("--first", type=int, default=0, help="batch; from 14 on ten share a network")
    parser.add_argument("--program", type=Path, help="checkout of the authors' program, for the part authors")
    parser.add_argument("--noises", type=float, nargs="+", help="deviations, for the parts authors and noise")
    takes_rows(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    program = Program(options.program) if options.part == "authors" else None
    for _, block in groupby(range(options.first, options.first + options.batches), network_of):
        batches = list(block)  # batch by batch, so that all sizes are there early
        for fields, settings in kinds(options.part, options):
            keys = [{"part": options.part, "batch": batch, **fields} for batch in batches]
            keys = [key for key in keys if kept.find(key) is None]
            if not keys:
                continue
            if program is not None:
                rows = [beside(key, program, **settings) for key in keys]
            elif options.part in ("exact", "auto"):
                rows = [(by_exact if options.part == "exact" else by_auto)(key) for key in keys]
            else:
                rows = together(tableak(), keys, **settings)
            for key, row in zip(keys, rows, strict=True):
                print(kept.add(key, row), flush=True)


if __name__ == "__main__":
    main()
