"""Record fits of XGBoost, scikit-learn and Keras; train scikit-learn's networks by PyTorch, to observe their steps."""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy.auditing.clear_text.findings import LEAST_DISTINCT, Leak, leak_of
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.federation.replies import Failure, attempt

ESTIMATORS = {
    "LogisticRegression": "sklearn.linear_model._logistic",
    "Ridge": "sklearn.linear_model._ridge",
    "LinearRegression": "sklearn.linear_model._base",
    "BaseSGDRegressor": "sklearn.linear_model._stochastic_gradient",
    "GaussianNB": "sklearn.naive_bayes",
    "DecisionTreeClassifier": "sklearn.tree._classes",
    "DecisionTreeRegressor": "sklearn.tree._classes",
    "BaseForest": "sklearn.ensemble._forest",
    "BaseMultilayerPerceptron": "sklearn.neural_network._multilayer_perceptron",
}
"""scikit-learn estimators or base classes -> their modules."""

MOST_BYTES = 1 << 28  # largest size of a table that is kept

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
    """List the leaks in a reply that holds nodes of scikit-learn trees that ``fit`` trained.

    The trees may be pickled, or an array for each attribute. ``arrays``, ``values``: the reply's entries, by
    record/name.
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
    """Records the data tables that a client passes to ``fit`` of imported libraries, such as scikit-learn."""

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
        (table, answers), kind = _table(rows, labels, float), type(estimator).__name__
        settings = {k: v for k, v in estimator.get_params().items() if isinstance(v, int | float | str | None)}
        trees = [getattr(each, "tree_", None) for each in getattr(estimator, "estimators_", [estimator])[:MOST_TREES]]
        held = [tree.__getstate__()["nodes"] for tree in trees if tree is not None]
        nodes = tuple(np.frombuffer(each.tobytes(), each.dtype) for each in held)  # with their padding
        classes = tuple(np.unique(answers).tolist())
        self.fits.append(Fitted(kind=kind, rows=table, labels=answers, settings=settings, classes=classes, nodes=nodes))


def _table(data: Any, label: Any, kind: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    if (sparse := hasattr(data, "toarray")) and np.prod(data.shape, dtype=float) * 8 > MOST_BYTES:
        raise ValueError("the sparse matrix is too large")
    rows: np.ndarray = np.array(data.toarray() if sparse else data, dtype=kind)
    labels = np.array(label, dtype=None if kind is float else float)
    if rows.ndim != 2 or labels.size != len(rows):
        raise ValueError("no table with labels")
    return rows, labels.ravel()


_MAKES = re.compile(r"init|creat|build|^make|get_(model|param|weights)|set_(model_)?(param|weights)|load_model")
"""Names of functions that make a network or set its weights."""

_NOT_ITS_OWN = re.compile(rf"site-packages|{re.escape(str(Path(__file__).parents[2]))}")

_ACTIVATIONS = {"relu": nn.ReLU, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "identity": nn.Identity}


class FromSklearn(nn.Module):
    """The network of a scikit-learn estimator in PyTorch; weights are (inputs, outputs), as in scikit-learn."""

    def __init__(self, estimator: Any) -> None:
        super().__init__()
        self.coefs = nn.ParameterList(torch.tensor(each, dtype=torch.float32) for each in estimator.coefs_)
        self.intercepts = nn.ParameterList(torch.tensor(each, dtype=torch.float32) for each in estimator.intercepts_)
        self.between = _ACTIVATIONS[estimator.activation]()

    def forward(self, rows: Tensor) -> Tensor:
        for place, (coef, intercept) in enumerate(zip(self.coefs, self.intercepts, strict=True)):
            rows = (rows if place == 0 else self.between(rows)) @ coef + intercept
        return rows

    def loss(self, activation: str, rows: Tensor, wanted: Tensor) -> Tensor:
        outputs = self(rows)
        if activation == "softmax":
            return F.cross_entropy(outputs, wanted)
        if activation == "identity":
            return F.mse_loss(outputs, wanted) / 2
        return F.binary_cross_entropy_with_logits(outputs.squeeze(1), wanted.float())


class InLayers(nn.Module):
    """A scikit-learn network in PyTorch's layers, with copied weights; ``named``, ``layouts``: see ``FromKeras``."""

    def __init__(self, network: FromSklearn) -> None:
        super().__init__()
        self.layers, self.named, self.layouts = nn.Sequential(), dict[str, str](), dict[str, tuple[int, ...]]()
        for place, (coef, intercept) in enumerate(zip(network.coefs, network.intercepts, strict=True)):
            layer = nn.Linear(*coef.shape)
            with torch.no_grad():
                layer.weight.copy_(coef.T)
                layer.bias.copy_(intercept)
            if place:
                self.layers.append(type(network.between)())
            inside = f"layers.{len(self.layers)}"
            self.named |= {f"coefs.{place}": f"{inside}.weight", f"intercepts.{place}": f"{inside}.bias"}
            self.layouts[f"{inside}.weight"] = (1, 0)
            self.layers.append(layer)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layers(rows)
        return outputs


@contextmanager
def sklearn_lent(code: str) -> Iterator[bool]:
    """Context in which scikit-learn's neural networks train in PyTorch; yields ``True`` if ``code`` uses them."""
    if not re.search(r"\bMLP(Classifier|Regressor)\b", code) or importlib.util.find_spec("sklearn") is None:
        yield False
        return
    owner = importlib.import_module("sklearn.neural_network._multilayer_perceptron").BaseMultilayerPerceptron
    with replaced(owner, "_initialize", _begun), replaced(owner, "_fit_stochastic", _trained):
        yield True


def _begun(original: Any, estimator: Any, *args: Any, **kwargs: Any) -> None:
    original(estimator, *args, **kwargs)
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    estimator._is_made = any(_MAKES.search(c.co_name) and not _NOT_ITS_OWN.search(c.co_filename) for c in codes)


def _trained(original: Any, estimator: Any, rows: Any, labels: Any, *args: Any, **kwargs: Any) -> None:
    incremental = args[-1] if args else kwargs.get("incremental", False)
    made = vars(estimator).pop("_is_made", False) and incremental
    usual = estimator.solver == "adam" or (estimator.solver == "sgd" and estimator.learning_rate == "constant")
    weighted = any(isinstance(each, np.ndarray) and each.ndim == 1 for each in args[:1])
    several = estimator.out_activation_ == "logistic" and labels.shape[1] > 1
    if made or not usual or weighted or several or estimator.early_stopping or not isinstance(rows, np.ndarray):
        original(estimator, rows, labels, *args, **kwargs)
        return
    size = min(200, len(rows)) if estimator.batch_size == "auto" else min(int(estimator.batch_size), len(rows))
    network, penalty = FromSklearn(estimator), estimator.alpha / size
    optimizer = _optimizer(estimator, network, penalty, goes_on=estimator.warm_start or incremental)
    kind = estimator.out_activation_
    classes = labels.argmax(1) if kind == "softmax" else labels[:, 0] if kind == "logistic" else None
    targets = torch.tensor(labels).float() if classes is None else torch.tensor(classes).long()
    order = torch.Generator().manual_seed(int(estimator._random_state.randint(1 << 31)))
    data = TensorDataset(torch.tensor(rows, dtype=torch.float32), targets)
    loader = DataLoader(data, batch_size=size, shuffle=estimator.shuffle, generator=order)
    estimator.n_iter_ = stalled = 0
    for _ in range(1 if incremental else estimator.max_iter):
        losses = list[tuple[float, int]]()
        for batch, wanted in loader:
            loss = network.loss(estimator.out_activation_, batch, wanted)
            optimizer.zero_grad()
            loss.backward()
            for intercept in network.intercepts:  # the penalty, the optimizer's decay, is of coefficients alone
                intercept.grad.sub_(intercept.detach(), alpha=penalty)
            optimizer.step()
            losses.append((float(loss.detach()), len(batch)))
        estimator.n_iter_, estimator.t_ = estimator.n_iter_ + 1, estimator.t_ + len(rows)
        estimator.loss_ = sum(loss * many for loss, many in losses) / max(sum(many for _, many in losses), 1)
        stalled = stalled + 1 if estimator.loss_ > estimator.best_loss_ - estimator.tol else 0
        estimator.best_loss_ = min(estimator.best_loss_, estimator.loss_)
        estimator.loss_curve_.append(estimator.loss_)
        if stalled > estimator.n_iter_no_change:
            break
    with torch.no_grad():
        for held, parameters in ((estimator.coefs_, network.coefs), (estimator.intercepts_, network.intercepts)):
            held[:] = [each.numpy().astype(old.dtype) for each, old in zip(parameters, held, strict=True)]


def _optimizer(estimator: Any, network: FromSklearn, penalty: float, *, goes_on: bool) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer
    own, rate, momentum = network.parameters(), estimator.learning_rate_init, estimator.momentum
    if estimator.solver == "adam":
        made = torch.optim.Adam(own, rate, (estimator.beta_1, estimator.beta_2), estimator.epsilon, penalty)
    else:
        nesterov = bool(momentum and estimator.nesterovs_momentum)
        made = torch.optim.SGD(own, rate, momentum, weight_decay=penalty, nesterov=nesterov)
    before = vars(estimator).get("_torch_optimizer")
    if before is not None and goes_on:
        made.load_state_dict(before.state_dict())
    estimator._torch_optimizer = made
    return made
