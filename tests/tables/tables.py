"""A small table of mixed columns, and updates of rows of it."""

import pandas as pd
import torch
from torch import nn

from fl_privacy.data import Dataset, TableExamples, table_of
from fl_privacy.models import TableMLP, build_fitting
from fl_privacy.types import Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId


def frame(rows: int = 400, seed: int = 0) -> pd.DataFrame:
    """Two numbers, three columns of categories, and a target that depends on them."""
    rng = torch.Generator().manual_seed(seed)
    age = (40 + 12 * torch.randn(rows, generator=rng)).round().clamp(18, 90)
    dose = 0.5 * torch.rand(rows, generator=rng).mul(100).round() / 10
    job, city, sex = (torch.randint(k, (rows,), generator=rng).tolist() for k in (6, 9, 2))
    target = (age / 12 + torch.tensor(job).float() + torch.randn(rows, generator=rng)) > 5.5
    return pd.DataFrame(
        {
            "age": age.int().numpy(),
            "dose": dose.double().numpy(),
            "job": [f"job {k}" for k in job],
            "city": [f"city {k}" for k in city],
            "sex": [("female", "male")[k] for k in sex],
            "label": [("no", "yes")[int(k)] for k in target],
        }
    )


def dataset() -> Dataset:
    return table_of(frame(), name="small")


def observe(
    size: int, seed: int = 0, *, known: bool = True, network: type[nn.Module] = TableMLP
) -> tuple[Observation, TableExamples]:
    """The gradient of so many rows by an untrained network, and the rows."""
    train = dataset().train
    assert isinstance(train, TableExamples)
    rows = train.subset(torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:size])
    model = build_fitting(network, train.architecture, seed=seed)
    batch, sent = rows.batch(torch.arange(size)), ModelState.of(model)
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return Observation(
        id=VictimId(0, 0, seed),
        model=model,
        sent=sent,
        upload=Upload(tensors=dict(zip(sent.parameters, found, strict=True)), num_examples=size),
        plan=LocalPlan(),
        input_shape=train.input_shape,
        num_classes=2,
        knowledge=Knowledge(labels=batch.labels if known else None),
    ), rows
