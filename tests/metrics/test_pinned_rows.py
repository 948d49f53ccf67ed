"""Cells and rows within tolerance, matched."""

import numpy as np
import pytest

from fl_privacy.errors import UserError
from fl_privacy.measure.tables import pinned_rows


def test_the_same_rows_in_another_order_are_all_right() -> None:
    truth = np.random.default_rng(0).normal(size=(150, 4))
    truth[3, 1] = np.nan
    found = pinned_rows(truth, truth[::-1])
    assert (found.cells, found.rows) == (1.0, 1.0)
    assert found.right.all()
    assert sorted(found.match) == list(range(150))


def test_numbers_have_a_tolerance_and_categories_none() -> None:
    truth = np.array([[0.0, 0.0], [10.0, 1.0], [20.0, 2.0]])
    near = truth + np.array([2.0, 0.2])
    assert pinned_rows(truth, near).rows == 1.0
    found = pinned_rows(truth, near, [1])
    assert (found.rows, found.cells) == (0.0, 0.5)
    assert found.by_feature.tolist() == [1.0, 0.0]
    assert (found.guess == -1).all()


def test_missing_guesses_count_as_wrong() -> None:
    truth = np.arange(8.0).reshape(4, 2)
    assert pinned_rows(truth, truth[:1]).cells == 0.25
    with pytest.raises(UserError, match="truth and guesses are expected"):
        pinned_rows(truth, np.zeros((2, 3)))
