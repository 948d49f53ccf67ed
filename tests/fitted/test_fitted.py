"""Optima, means and variances beside scikit-learn's own fits."""

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.naive_bayes import GaussianNB

from experiments.measures import row_between_optima
from fl_privacy.attacks.fitted import (
    LogisticOptimum,
    Moments,
    last_row,
    rows_alone,
    rows_between,
    weighted_sums,
)
from fl_privacy.errors import UserError


def iris(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows, labels = load_iris(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(rows))
    return rows[order], labels[order]


def moments(rows: np.ndarray, labels: np.ndarray, *, counted: bool = True) -> Moments:
    model = GaussianNB().fit(rows, labels)
    return Moments(means=model.theta_, variances=model.var_, counts=model.class_count_ if counted else None)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("way", [1, -1])
def test_one_row_between_two_rounds(counted: bool, way: int) -> None:
    rows, labels = iris()
    fits = [moments(rows[:n], labels[:n], counted=counted) for n in (70, 71)][::way]
    (found,) = rows_between(*fits)
    assert (found.label, found.change) == (labels[70], way)
    assert found.before == (labels[: 70 + (way < 0)] == labels[70]).sum()
    assert np.allclose(found.rows[0], rows[70], atol=1e-6)


def test_two_rows_of_a_class_give_each_feature_s_two_values() -> None:
    rows, labels = iris()
    pair = np.flatnonzero(labels == 1)[-2:]
    rest = np.setdiff1d(np.arange(len(rows)), pair)
    (found,) = rows_between(moments(rows[rest], labels[rest]), moments(rows, labels))
    assert found.change == 2
    assert np.allclose(found.rows, np.sort(rows[pair], 0), atol=1e-3)


def test_a_row_for_another_of_its_class_gives_both_where_they_differ() -> None:
    rows, labels = iris()
    went, came = np.flatnonzero(labels == 1)[-2:]
    rest = np.setdiff1d(np.arange(len(rows)), [went, came])
    fits = [moments(rows[chosen], labels[chosen]) for chosen in (np.append(rest, went), np.append(rest, came))]
    (found,) = rows_between(*fits)
    differ = rows[went] != rows[came]
    assert (found.label, found.change, found.before) == (1, 0, 49)
    assert differ.any() and np.isnan(found.rows[:, ~differ]).all()
    assert np.allclose(found.rows[:, differ], rows[[went, came]][:, differ], atol=1e-4)


@pytest.mark.parametrize("counted", [True, False])
def test_a_row_alone_in_its_class_is_its_mean(counted: bool) -> None:
    rows, labels = iris()
    chosen = np.append(np.flatnonzero(labels != 2), np.flatnonzero(labels == 2)[:1])
    ((label, row),) = rows_alone(moments(rows[chosen], labels[chosen], counted=counted))
    assert label == 2 and np.allclose(row, rows[chosen[-1]])
    assert rows_alone(moments(rows, labels, counted=counted)) == ()
    scaled = (rows[labels == 0] - rows[labels == 0].mean(0)) / rows[labels == 0].std(0)
    assert rows_alone(moments(scaled, labels[labels == 0], counted=counted)) == (), "their deviations are all one"


def test_many_rows_give_their_mean_and_nothing_gives_nothing() -> None:
    rows, labels = iris()
    found = rows_between(moments(rows[:60], labels[:60]), moments(rows, labels))
    assert [each.label for each in found] == [0, 1, 2]
    for each in found:
        came = rows[60:][labels[60:] == each.label]
        assert len(each.rows) == 0
        assert np.allclose(each.mean, came.mean(0), atol=1e-9)
        assert np.allclose(each.deviation, came.std(0), atol=1e-4)
    assert rows_between(moments(rows, labels), moments(rows, labels)) == ()
    assert rows_between(moments(rows, labels, counted=False), moments(rows[:60], labels[:60], counted=False)) == ()


def optimum(rows: np.ndarray, labels: np.ndarray, **options: object) -> LogisticOptimum:
    given = {"C": 0.7, "tol": 1e-10, "max_iter": 10_000, **options}
    model = LogisticRegression(**given).fit(rows, labels)
    return LogisticOptimum(weights=model.coef_, intercepts=model.intercept_, inverse_penalty=0.7)


def test_weights_are_weighted_sums_of_rows() -> None:
    rows, labels = iris()
    found = optimum(rows, labels)
    assert np.allclose(weighted_sums(found), found.residuals(rows, labels).T @ rows, atol=1e-3)


def test_the_last_last_row_ones() -> None:
    rows, labels = iris()
    for k in range(60, 80):
        row, label = last_row(optimum(rows[: k + 1], labels[: k + 1]), rows[:k], labels[:k])
        assert label == labels[k]
        assert np.allclose(row, rows[k], atol=0.05)
        control, _ = last_row(optimum(rows[:k], labels[:k]), rows[:k], labels[:k])
        assert not np.allclose(control, rows[k], atol=0.05)


def test_the_last_row_of_a_linear_regression_comes_with_its_number() -> None:
    rows, targets = load_diabetes(return_X_y=True, scaled=False)
    model = Ridge(alpha=3.0).fit(rows[:50], targets[:50])
    given = {"intercepts": np.reshape(model.intercept_, 1), "inverse_penalty": 1 / 3, "linear": True}
    row, target = last_row(LogisticOptimum(weights=model.coef_[None], **given), rows[:49], targets[:49])
    assert np.allclose(row, rows[49], atol=1e-3) and target == pytest.approx(targets[49], abs=1e-3)


def test_a_row_between_optima_of_rows_that_are_known() -> None:
    rows, labels = load_breast_cancer(return_X_y=True)
    rows = (rows[:, :6] - rows[:, :6].mean(0)) / rows[:, :6].std(0)
    near = []
    for k in range(200, 215):
        fits = [optimum(rows[:n], labels[:n], solver="newton-cholesky") for n in (k, k + 1)]
        row, label = row_between_optima(*fits, rows[:k], k)
        near.append(label == labels[k] and np.allclose(row, rows[k], atol=0.1))
    assert np.mean(near) > 0.8


def test_bad_input_is_told() -> None:
    with pytest.raises(UserError, match="Means, variances"):
        Moments(means=np.zeros((2, 3)), variances=np.zeros((2, 2)))
    with pytest.raises(UserError, match="Counts of 2 classes"):
        Moments(means=np.zeros((2, 3)), variances=np.zeros((2, 3)), counts=np.zeros(3))
    with pytest.raises(UserError, match="Rounds of one model"):
        rows_between(*(Moments(means=np.zeros((2, n)), variances=np.zeros((2, n))) for n in (2, 3)))
    with pytest.raises(UserError, match="Weights"):
        LogisticOptimum(weights=np.zeros(3), intercepts=np.zeros(1))
    with pytest.raises(UserError, match="Finite means"):
        Moments(means=np.zeros((2, 3)), variances=np.zeros((2, 3)), counts=np.array([np.inf, 1.0]))
    with pytest.raises(UserError, match="Finite weights"):
        LogisticOptimum(weights=np.full((1, 2), np.nan), intercepts=np.zeros(1))
    same = LogisticOptimum(weights=np.zeros((1, 2)), intercepts=np.zeros(1))
    with pytest.raises(UserError, match="equal"):
        row_between_optima(same, same, np.zeros((3, 2)), 3)
