"""Record fits of XGBoost, scikit-learn and Keras while a client answers, to judge guesses afterwards."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_privacy.auditing.clear_text.findings import LEAST_DISTINCT, Leak, leak_of
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.federation.replies import Failure, attempt

ESTIMATORS = {
    "LogisticRegression": "sklearn.linear_model._logistic",
    "GaussianNB": "sklearn.naive_bayes",
    "DecisionTreeClassifier": "sklearn.tree._classes",
    "DecisionTreeRegressor": "sklearn.tree._classes",
    "BaseForest": "sklearn.ensemble._forest",
    "BaseMultilayerPerceptron": "sklearn.neural_network._multilayer_perceptron",
}
"""scikit-learn estimators or base classes -> their modules."""

MOST_BYTES = 1 << 28
"""Largest size of a table that is kept."""

MOST_TREES, _NOTED = 32, "_fl_privacy_table"
"""Largest number of a forest's trees that are searched in replies, and attribute of a matrix that holds its table."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """One call of an estimator's ``fit`` on ``rows`` (N, F), NaN for a missing value, and ``labels`` (N,).

    ``kind``: ``trees`` (XGBoost), ``network``, or the estimator's class. ``nodes``: a structured array for each
    scikit-learn tree, at most ``MOST_TREES`` of a forest.
    """

    kind: str
    rows: np.ndarray = field(repr=False)
    labels: np.ndarray = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    classes: tuple[Any, ...] = ()
    nodes: tuple[np.ndarray, ...] = field(default=(), repr=False)


def leaks_of_nodes(fit: Fitted, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> list[Leak]:
    """List the leaks in a reply that holds nodes of scikit-learn's trees, pickled or as an array for each field.

    ``arrays`` and ``values``: content of the reply by record/name.
    """
    pickled = {key: array.tobytes() for key, array in arrays.items() if array.dtype == np.uint8 and array.ndim == 1}
    pickled |= {key: value for key, value in values.items() if isinstance(value, bytes)}
    found = []
    for key, content in pickled.items():
        if held := sum(nodes.tobytes() in content for nodes in fit.nodes):
            trees = f"{held} decision tree{'s' * (held != 1)} of scikit-learn{' at least' * (held == MOST_TREES)}"
            what = f"{trees}, with thresholds and how many examples are in each node"
            found.append(leak_of("nodes", key, what))
    for key, array in arrays.items():
        for name, what in _NODE_VALUES.items() if array.dtype.kind in "fiu" else ():
            sought = [column for nodes in fit.nodes if len(np.unique(column := nodes[name])) >= LEAST_DISTINCT]
            given = array.reshape(-1).astype(np.float64)
            if any(len(given) == len(column) and np.allclose(given, column, rtol=1e-6, atol=0.0) for column in sought):
                found.append(leak_of("nodes", key, what))
    return found


_NODE_VALUES = {
    "threshold": "thresholds of a decision tree",
    "n_node_samples": "how many of the client's examples are in each node of a decision tree",
}
"""Field of scikit-learn's nodes -> description."""


class FittedBy:
    """Records the tables on which a client fits models of imported libraries."""

    def __init__(self) -> None:
        self.fits: list[Fitted] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        with ExitStack() as stack:
            core = sys.modules.get("xgboost.core")
            if core is not None and "__init__" in vars(core.DMatrix) and "update" in vars(core.Booster):
                stack.enter_context(replaced(core.DMatrix, "__init__", self.on_table))
                stack.enter_context(replaced(core.Booster, "update", self.on_update))
            for name, module in ESTIMATORS.items():
                owner = getattr(sys.modules.get(module), name, None)
                if isinstance(owner, type) and "fit" in vars(owner):
                    stack.enter_context(replaced(owner, "fit", self.on_fit))
            network = getattr(sys.modules.get("keras"), "Model", None)
            for owner in [each for each in getattr(network, "__mro__", ()) if "fit" in vars(each)][:1]:
                stack.enter_context(replaced(owner, "fit", self.on_training))
            yield

    def on_table(self, init: Any, matrix: Any, data: Any, label: Any = None, *args: Any, **kwargs: Any) -> None:
        init(matrix, data, label, *args, **kwargs)
        table = attempt(lambda: _table(data, label))
        if not isinstance(table, Failure):
            setattr(matrix, _NOTED, table)

    def on_update(self, update: Any, booster: Any, dtrain: Any, *args: Any, **kwargs: Any) -> Any:
        table = getattr(dtrain, _NOTED, None)
        if table is not None and not any(one.rows is table[0] for one in self.fits):
            self.fits.append(Fitted(kind="trees", rows=table[0], labels=table[1]))
        return update(booster, dtrain, *args, **kwargs)

    def on_fit(self, fit: Any, estimator: Any, X: Any, y: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        done = fit(estimator, X, y, *args, **kwargs)
        attempt(lambda: self._note(estimator, X, y))  # an unknown kind of table is ignored
        return done

    def on_training(self, fit: Any, network: Any, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and x.nbytes < MOST_BYTES and len(x) == len(y):
            labels = y.argmax(1) if y.ndim == 2 and y.shape[1] > 1 else y.reshape(len(y), -1)[:, 0]
            if labels.min(initial=0) >= 0 and (labels == labels.astype(int)).all():
                rows = x.reshape(len(x), -1).astype(np.float32)
                self.fits.append(Fitted(kind="network", rows=rows, labels=labels.astype(int)))
        return fit(network, x, y, *args, **kwargs)

    def _note(self, estimator: Any, rows: Any, labels: Any) -> None:
        table, answers, kind = np.array(rows, dtype=float), np.array(labels), type(estimator).__name__
        settings = {k: v for k, v in estimator.get_params().items() if isinstance(v, int | float | str | bool)}
        if table.ndim != 2 or answers.shape != table.shape[:1]:
            return
        trees = [getattr(each, "tree_", None) for each in getattr(estimator, "estimators_", [estimator])[:MOST_TREES]]
        held = [tree.__getstate__()["nodes"] for tree in trees if tree is not None]
        nodes = tuple(np.frombuffer(each.tobytes(), each.dtype) for each in held)  # with their padding
        classes = tuple(np.unique(answers).tolist())
        self.fits.append(Fitted(kind=kind, rows=table, labels=answers, settings=settings, classes=classes, nodes=nodes))


def _table(data: Any, label: Any) -> tuple[np.ndarray, np.ndarray]:
    rows, labels = np.array(data, dtype=np.float32), np.array(label, dtype=float).ravel()
    if rows.ndim != 2 or len(labels) != len(rows):
        raise ValueError("no table with labels")
    return rows, labels
