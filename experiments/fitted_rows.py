"""What parameters of scikit-learn's fitted models give away of rows. Run by experiments/trees.py --part sklearn."""

import time

import numpy as np
from measures import row_between_optima
from row_file import RowFile
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB

from fl_privacy.attacks.fitted import LogisticOptimum, Moments, last_row, rows_between
from fl_privacy.errors import UserError

EXACT = 0.01
"""Largest error of a feature, as a share of its range, in a row that is read."""

NUMBER = 100
"""Rows that come, one at a time."""


def write_fitted(kept: RowFile) -> None:
    """Write all rows of the table."""
    for name, load in (("breast_cancer", load_breast_cancer), ("iris", load_iris)):
        rows, labels = load(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(rows))
        rows, labels = rows[order], labels[order]
        rows = (rows - rows.mean(0)) / rows.std(0)
        first = len(rows) // 3
        victims = range(first, min(first + NUMBER, len(rows) - 1))
        for counted in (True, False):
            add(kept, name, "GaussianNB" + ("" if counted else ", counts not sent"), "one row came between two rounds",
                [bayes(rows, labels, k, counted) for k in victims])  # fmt: skip
        fits = {"lbfgs, tol 1e-4 (default)": {}, "lbfgs, tol 1e-10": {"tol": 1e-10, "max_iter": 10_000}}
        if name == "breast_cancer":
            fits["newton-cholesky, tol 1e-10"] = {"solver": "newton-cholesky", "tol": 1e-10, "max_iter": 1000}
        for solver, options in fits.items():
            add(kept, name, f"LogisticRegression, {solver}", "all rows but one are known",
                [informed(rows, labels, k, options) for k in victims])  # fmt: skip
        if name == "breast_cancer":
            options = fits["newton-cholesky, tol 1e-10"]
            for what, sample in (("one row came; other rows of the population known", slice(first + NUMBER, None)),
                                 ("one row came; the client's others known", None)):  # fmt: skip
                add(kept, name, "LogisticRegression, newton-cholesky, tol 1e-10", what,
                    [between(rows, labels, k, sample, options) for k in victims])  # fmt: skip


def add(kept: RowFile, data: str, model: str, attack: str, found: list[tuple[np.ndarray | None, np.ndarray]]) -> None:
    """Judge guesses beside the mean row, which never saw a model (features are standardized)."""
    began = time.perf_counter()
    truth = np.stack([row for _, row in found])
    spread = np.ptp(truth, axis=0)
    guesses = np.stack([np.full(truth.shape[1], np.nan) if guess is None else guess for guess, _ in found])
    apart = np.abs(guesses - truth)
    row = kept.add(
        {"data": data, "model": model, "attack": attack},
        {
            "n": len(found),
            "rows read": float((apart <= EXACT * spread).all(1).mean()),
            "cells within 0.319": round(float((apart <= 0.319).mean()), 4),
            "of the mean row": round(float((np.abs(truth) <= 0.319).mean()), 4),
            "median error": float(np.nanmedian(apart)),
        },
    )
    print(row, f"{time.perf_counter() - began:.0f} s", flush=True)


def moments(rows: np.ndarray, labels: np.ndarray, counted: bool) -> Moments:
    model = GaussianNB().fit(rows, labels)
    return Moments(means=model.theta_, variances=model.var_, counts=model.class_count_ if counted else None)


def bayes(rows: np.ndarray, labels: np.ndarray, k: int, counted: bool) -> tuple[np.ndarray | None, np.ndarray]:
    found = rows_between(moments(rows[:k], labels[:k], counted), moments(rows[: k + 1], labels[: k + 1], counted))
    hit = next((one for one in found if len(one.rows)), None)
    return (None if hit is None else hit.rows[0]), rows[k]


def optimum(rows: np.ndarray, labels: np.ndarray, options: dict[str, object]) -> LogisticOptimum:
    model = LogisticRegression(**{"C": 1.0, **options}).fit(rows, labels)
    return LogisticOptimum(weights=model.coef_, intercepts=model.intercept_)


def informed(
    rows: np.ndarray, labels: np.ndarray, k: int, options: dict[str, object]
) -> tuple[np.ndarray | None, np.ndarray]:
    try:
        found, _ = last_row(optimum(rows[: k + 1], labels[: k + 1], options), rows[:k], labels[:k])
    except UserError:
        return None, rows[k]
    return found, rows[k]


def between(
    rows: np.ndarray, labels: np.ndarray, k: int, sample: slice | None, options: dict[str, object]
) -> tuple[np.ndarray | None, np.ndarray]:
    before, after = optimum(rows[:k], labels[:k], options), optimum(rows[: k + 1], labels[: k + 1], options)
    try:
        found, _ = row_between_optima(before, after, rows[:k] if sample is None else rows[sample], k)
    except UserError:  # the row moved nothing
        return None, rows[k]
    return found, rows[k]
