"""Train scikit-learn's networks (``MLPClassifier``, ``MLPRegressor``) by PyTorch, whose steps are observed."""

import importlib
import importlib.util
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy.auditing.instrument.watch import replaced

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
    """A network of scikit-learn in PyTorch's layers, with copies of its weights; attributes as in ``FromKeras``."""

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
    """Train scikit-learn's networks using PyTorch until the block ends; yield ``True`` if ``code`` has some."""
    if not re.search(r"\bMLP(Classifier|Regressor)\b", code) or importlib.util.find_spec("sklearn") is None:
        yield False
        return
    owner = importlib.import_module("sklearn.neural_network._multilayer_perceptron").BaseMultilayerPerceptron
    with replaced(owner, "_initialize", _begun), replaced(owner, "_fit_stochastic", _trained):
        yield True


def _begun(original: Any, estimator: Any, *args: Any, **kwargs: Any) -> None:
    """Initialize an estimator's network, and mark it if the app calls ``partial_fit`` only to create the network."""
    original(estimator, *args, **kwargs)
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    estimator._is_made = any(_MAKES.search(c.co_name) and not _NOT_ITS_OWN.search(c.co_filename) for c in codes)


def _trained(original: Any, estimator: Any, rows: Any, labels: Any, *args: Any, **kwargs: Any) -> None:
    """Train a network as scikit-learn does, with the same optimizer; ``original`` trains for unsupported options."""
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
    """Return an estimator's optimizer with weight decay ``penalty``; if ``goes_on``, in its last state."""
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
