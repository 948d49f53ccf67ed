"""Cells become what a model takes, and cells again."""

import math
from typing import Any

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.types.schema import TOLERANCE, Column, Schema
from tests.tables.tables import dataset

SCHEMA = Schema(
    (
        Column(name="age", shift=(40.0,), scale=(10.0,), low=18, high=90),
        Column(name="job", categories=("a", "b", "c"), shift=(0.5, 0.3, 0.2), scale=(0.5, 0.4, 0.4)),
        Column(name="dose", shift=(1.0,), scale=(0.5,), low=0, high=3, decimals=2),
    )
)


def test_cells_survive_the_way_to_a_model_and_back() -> None:
    cells = torch.tensor([[18.0, 2, 0.25], [90, 0, 3], [44, 1, 1.5]], dtype=torch.float64)
    inputs = SCHEMA.encode(cells)
    assert inputs.shape == (3, SCHEMA.width) and SCHEMA.width == 5
    torch.testing.assert_close(SCHEMA.cells(inputs), cells, atol=1e-5, rtol=0)
    assert SCHEMA.written(cells)[0] == ["18", "c", "0.25"]
    torch.testing.assert_close(SCHEMA.nearest(inputs), inputs)


def test_categories_are_standardized_where_asked() -> None:
    one = SCHEMA.encode(torch.tensor([[40.0, 1, 1]]))[0]
    torch.testing.assert_close(one, torch.tensor([0.0, -1.0, 0.7 / 0.4, -0.5, 0.0]))


def test_a_guess_beyond_the_bounds_is_cut_to_them() -> None:
    assert SCHEMA.cells(torch.tensor([[99.0, 0, 9, 0, -99]])).tolist() == [[90, 1, 0]]


def test_the_tolerance_is_a_share_of_the_deviation() -> None:
    assert SCHEMA.tolerances.tolist() == [TOLERANCE * 10, 0, TOLERANCE * 0.5]


@pytest.mark.parametrize(
    "changed",
    [
        {"decimals": 10**9},
        {"decimals": -1},
        {"std": math.nan},
        {"std": -1.0},
        {"low": math.nan},
        {"low": 2.0, "high": 1.0},
    ],
)
def test_a_column_claims_nothing_that_can_not_be(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected"):
        Column(**{"name": "a", "shift": (0.0,), "scale": (1.0,), **changed})


def test_width_is_bounded() -> None:
    wide = Column(name="a", categories=tuple(map(str, range(10_000))), shift=(0.0,) * 10_000, scale=(1.0,) * 10_000)
    with pytest.raises(UserError, match="at most 100000 values"):
        Schema((wide,) * 11)


def test_categories_are_found_in_what_a_model_takes() -> None:
    train = dataset().train
    found = Schema.inferred(train.inputs)
    assert [len(c.categories) for c in found.columns] == [len(c.categories) for c in train.schema.columns]
    torch.testing.assert_close(found.encode(found.cells(train.inputs)), train.inputs, atol=1e-5, rtol=0)


def test_nothing_is_inferred_from_what_is_no_table() -> None:
    for wrong in (torch.zeros(3), torch.zeros(1, 4), torch.full((3, 3), float("nan"))):
        with pytest.raises(UserError, match="Rows are expected"):
            Schema.inferred(wrong)


def test_rows_of_nobody_are_rows() -> None:
    drawn = SCHEMA.drawn(50, torch.Generator().manual_seed(0))
    torch.testing.assert_close(SCHEMA.nearest(drawn), drawn, atol=1e-5, rtol=0)
