"""What XGBoost and scikit-learn are given to fit while a client answers, so that guesses can be judged afterwards."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.tapping.watch import _replaced

ESTIMATORS = {
    "LogisticRegression": "sklearn.linear_model._logistic",
    "GaussianNB": "sklearn.naive_bayes",
}
"""Estimators of scikit-learn whose parameters are read -> the module that defines them."""

_NOTED = "_fl_privacy_table"


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """One call of an estimator's ``fit``.

    Attributes:
        kind: ``trees``, or the estimator's name.
        rows: (N, F) that were fitted to, NaN for no value.
        labels: (N,).
        settings: of the estimator, numbers, texts and truth values alone.
        classes: of the estimator, in its order; empty for trees.
    """

    kind: str
    rows: np.ndarray = field(repr=False)
    labels: np.ndarray = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    classes: tuple[Any, ...] = ()


class FittedBy:
    """Notes fits until the block ends; what an app did not import is not imported for it."""

    def __init__(self) -> None:
        self.fits: list[Fitted] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Watch calls of ``fit`` while the context lasts."""
        with ExitStack() as stack:
            core = sys.modules.get("xgboost.core")
            if core is not None and "__init__" in vars(core.DMatrix) and "update" in vars(core.Booster):
                stack.enter_context(_replaced(core.DMatrix, "__init__", self._around_table))
                stack.enter_context(_replaced(core.Booster, "update", self._around_update))
            for name, module in ESTIMATORS.items():
                owner = getattr(sys.modules.get(module), name, None)
                if isinstance(owner, type) and "fit" in vars(owner):
                    stack.enter_context(_replaced(owner, "fit", self._around_fit))
            yield

    def _around_table(self, init: Any) -> Any:
        def made(matrix: Any, data: Any, label: Any = None, *args: Any, **kwargs: Any) -> None:
            init(matrix, data, label, *args, **kwargs)
            table = attempt(lambda: _table(data, label))
            if not isinstance(table, Failure):
                setattr(matrix, _NOTED, table)

        return made

    def _around_update(self, update: Any) -> Any:
        def updated(booster: Any, dtrain: Any, *args: Any, **kwargs: Any) -> Any:
            table = getattr(dtrain, _NOTED, None)
            if table is not None and not any(one.rows is table[0] for one in self.fits):
                self.fits.append(Fitted(kind="trees", rows=table[0], labels=table[1]))
            return update(booster, dtrain, *args, **kwargs)

        return updated

    def _around_fit(self, fit: Any) -> Any:
        def fitted(estimator: Any, X: Any, y: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
            done = fit(estimator, X, y, *args, **kwargs)
            noted = attempt(lambda: self._note(estimator, X, y))
            del noted  # a table that is not understood is none to judge by
            return done

        return fitted

    def _note(self, estimator: Any, rows: Any, labels: Any) -> None:
        table, answers = np.asarray(rows, dtype=float), np.asarray(labels)
        settings = {k: v for k, v in estimator.get_params().items() if isinstance(v, int | float | str | bool)}
        if table.ndim == 2 and answers.shape == table.shape[:1]:
            self.fits.append(
                Fitted(
                    kind=type(estimator).__name__,
                    rows=table.copy(),
                    labels=answers.copy(),
                    settings=settings,
                    classes=tuple(np.unique(answers).tolist()),
                )
            )


def _table(data: Any, label: Any) -> tuple[np.ndarray, np.ndarray]:
    rows, labels = np.array(data, dtype=np.float32), np.array(label, dtype=float).ravel()
    if rows.ndim != 2 or len(labels) != len(rows):
        raise ValueError("no table with labels")
    return rows, labels
