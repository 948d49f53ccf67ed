"""What counts as right, and what a guess without the update reaches."""

from dataclasses import replace
from itertools import permutations

import torch

from fl_privacy.measure import evaluate_all
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.outcome import Outcome, outcome_of
from fl_privacy.measure.tables import assign, control_cells, right_cells, usual_row
from fl_privacy.types import Batch, Certainty, Reconstruction, VictimId
from tests.tables.tables import dataset
from tests.tables.test_schema import SCHEMA

TRUTH = torch.tensor([[40.0, 0, 1.0], [60, 1, 2.0]], dtype=torch.float64)


def test_a_number_is_right_within_the_tolerance_and_a_category_where_it_is_equal() -> None:
    guess = TRUTH + torch.tensor([[3.18, 0, 0], [3.2, 1, 0.159]])
    assert right_cells(SCHEMA, guess, TRUTH).tolist() == [[True, True, True], [False, False, True]]


def test_rows_are_matched_as_all_orders_would_be() -> None:
    data = dataset()
    schema, cells = data.train.schema, data.train.schema.cells(data.train.inputs)
    for seed in range(5):
        order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))
        truth, guess = cells[order[:5]], cells[order[3:8]]
        found = right_cells(schema, guess[assign(schema, guess, truth)], truth).sum()
        assert found == max(right_cells(schema, guess[list(p)], truth).sum() for p in permutations(range(5)))


def test_guesses_without_the_update_are_seldom_called_read() -> None:
    """The control of one row is beaten by one in twenty guesses, of as many rows as there are."""
    data = dataset()
    schema, public = data.train.schema, data.test.schema.cells(data.test.inputs)
    truth = schema.cells(data.train.inputs[:100])
    beaten = []
    for size in (1, 5):
        for begin in range(0, 100, size):
            own = truth[begin : begin + size]
            rows = public[torch.randint(len(public), (size,), generator=torch.Generator().manual_seed(1000 + begin))]
            right = right_cells(schema, rows[assign(schema, rows, own)], own).double().mean(1)
            beaten += (right > control_cells(public, own, schema) + 1e-9).tolist()
    assert sum(beaten) / len(beaten) <= 0.08


def test_the_usual_row_is_the_mode_and_the_median() -> None:
    public = torch.tensor([[20.0, 2, 1], [30, 2, 1], [80, 0, 3]], dtype=torch.float64)
    assert usual_row(public, SCHEMA).tolist() == [30, 2, 1]


def test_outcomes_of_rows() -> None:
    data = dataset()
    train, schema = data.train, data.train.schema
    truth = train.batch(torch.arange(4))
    others = Distractors(rows=schema.cells(data.test.inputs))
    near = truth.inputs.clone()
    near[:, schema.number_values] += 0.2
    flipped = near.flip(0)
    for inputs, expected in ((truth.inputs, Outcome.EXACT), (flipped, Outcome.RECOGNIZABLE)):
        one = Reconstruction(id=VictimId(0, 0, 0), batch=Batch(inputs, truth.labels))
        (score,) = evaluate_all([one], [truth], schema=schema, others=others)
        records = [
            {**image.values, **image.compared.as_record(), "certainty": image.certainty} for image in score.images
        ]
        assert {outcome_of(record) for record in records} == {expected}
        assert all(record["row_right"] == 1 for record in records)
    nobody = Batch(data.test.inputs[:4], truth.labels)
    (score,) = evaluate_all([Reconstruction(id=VictimId(0, 0, 0), batch=nobody)], [truth], schema=schema, others=others)
    assert all(i.outcome is Outcome.NOTHING for i in score.images if i.values["cells_right"] < 0.5)


def test_what_is_called_proven_and_wrong_is_not_exact() -> None:
    record = {"cells_right": 0.4, "row_right": 0.0, "control_cells": 0.5, "certainty": Certainty.PROVEN}
    assert outcome_of(record) is Outcome.NOTHING
    assert outcome_of({**record, "row_right": 1.0, "cells_right": 1.0}) is Outcome.EXACT


def test_a_guess_of_another_shape_fails_in_a_line() -> None:
    data = dataset()
    truth = data.train.batch(torch.arange(2))
    for wrong in (torch.zeros(2, 3), torch.zeros(2, 3, 8, 8), torch.full_like(truth.inputs, float("nan"))):
        one = Reconstruction(id=VictimId(0, 0, 0), batch=Batch(wrong, truth.labels))
        (score,) = evaluate_all([one], [truth], schema=data.train.schema)
        assert all(image.failure for image in score.images)
    fewer = replace(one, batch=Batch(truth.inputs[:1], truth.labels[:1]))
    (score,) = evaluate_all([fewer], [truth], schema=data.train.schema)
    assert [image.failure is None for image in score.images].count(True) == 1
