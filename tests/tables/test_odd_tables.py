"""Tables as they should not be, batches with a row twice, and what auto does where equations have many answers."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fl_privacy.attacks import AutoAttack, ExactInversion, tableak
from fl_privacy.data import TableExamples, table_of
from fl_privacy.measure.tables import assign, right_cells
from fl_privacy.models import TableLogistic, TableMLP, build_fitting
from fl_privacy.types import Certainty, LocalPlan, ModelState, Observation, Upload, VictimId
from tests.tables.tables import dataset, observe as observe_small

N = 120


def odd(kind: str) -> TableExamples:
    rng = np.random.default_rng(0)
    columns = {"age": rng.integers(20, 90, N), "sex": rng.choice(["f", "m"], N), "dose": rng.normal(size=N)}
    plain = pd.DataFrame(columns)
    changed = {
        "constant": plain.assign(one=3.0, only="one"),
        "huge": plain.assign(huge=1e30 * rng.normal(size=N)),
        "an outlier": plain.assign(dose=np.where(np.arange(N) == 5, 1e18, columns["dose"])),
        "infinite": plain.assign(dose=np.where(np.arange(N) == 5, np.inf, columns["dose"])),
        "missing": plain.assign(dose=np.where(np.arange(N) % 3 == 0, np.nan, columns["dose"])),
        "a column twice": plain.assign(again=plain["dose"], sex_again=plain["sex"]),
        "a name each": plain.assign(name=[f"p{k}" for k in range(N)]),
    }[kind]
    train = table_of(changed.assign(target=rng.choice(["no", "yes"], N)), target="target").train
    assert isinstance(train, TableExamples)
    return train


def observe(train: TableExamples, rows: list[int], network: type[nn.Module]) -> tuple[Observation, torch.Tensor]:
    model, batch = build_fitting(network, train.architecture, seed=0), train.batch(torch.tensor(rows))
    sent, loss = ModelState.of(model), nn.functional.cross_entropy(model(batch.inputs), batch.labels)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return Observation(
        id=VictimId(0, 0, 0),
        model=model,
        sent=sent,
        upload=Upload(tensors=dict(zip(sent.parameters, found, strict=True)), num_examples=len(rows)),
        plan=LocalPlan(),
        input_shape=train.input_shape,
        num_classes=2,
    ), train.schema.cells(batch.inputs)


@pytest.mark.parametrize(
    "kind", ["constant", "huge", "an outlier", "infinite", "missing", "a column twice", "a name each"]
)
@pytest.mark.parametrize("network", [TableMLP, TableLogistic])
def test_proven_is_right_on_odd_tables_and_all_that_is_read_is_finite(kind: str, network: type[nn.Module]) -> None:
    train = odd(kind)
    for rows in ([5], [0, 1], [2, 2, 3], [4, 4], [5, 6, 7, 8]):
        observation, truth = observe(train, rows, network)
        (found,) = ExactInversion(rounds=8)([observation], seed=0)
        if found.batch is None:
            continue
        assert bool(found.batch.inputs.isfinite().all())
        if found.certainty is Certainty.PROVEN:
            cells = train.schema.cells(found.batch.inputs)
            assert bool(right_cells(train.schema, cells[assign(train.schema, cells, truth)], truth).all()), rows


def test_mixtures_of_rows_that_explain_an_update_are_no_rows_and_the_descent_is_asked() -> None:
    """Behind a linear model quotients of gradients explain an update of several rows, and are none of them."""
    observation, rows = observe_small(4, known=False, network=TableLogistic)
    (solved,) = ExactInversion(rounds=2)([observation], seed=0)
    (found,) = AutoAttack(budget="quick")([observation], seed=0)
    (sought,) = tableak(iterations=60, restarts=10)([observation], seed=0)
    schema = dataset().train.schema
    truth = schema.cells(rows.inputs)

    def share(inputs: torch.Tensor) -> float:
        cells = schema.cells(inputs)
        return float(right_cells(schema, cells[assign(schema, cells, truth)], truth).double().mean())

    assert solved.batch is not None and found.batch is not None and sought.batch is not None
    assert solved.certainty is Certainty.CONSISTENT
    assert found.member == "tableak"
    assert share(found.batch.inputs) >= share(sought.batch.inputs)
    assert share(found.batch.inputs) > share(solved.batch.inputs)
