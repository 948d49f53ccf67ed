"""Infer the columns of a table from the first layer's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.types import Observation
from fl_privacy.types.schema import Schema

_ROUNDING = 2e-6
"""Share of the bias' gradient below which the rest of a category's column is rounding."""

_DRAWN = 256
"""Random rows that show the model's answers to rows of a class."""

_LEAST = 0.02
"""Least share of a category that may be present."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Evidence about the columns of a batch of B rows.

    Attributes:
        present: (F,) bool: ``False`` for categories that no row has.
        shares: (K, F) share of each category in the rows of each class, and mean of each number as a model takes it.
    """

    present: Tensor
    shares: Tensor


def first_linear(model: nn.Module, width: int) -> str | None:
    """Return the path of the linear layer with a bias that the rows (B, F) enter, if it is the first."""
    for path, module in model.named_modules():
        if next(module.children(), None) is None and next(module.parameters(), None) is not None:
            sound = isinstance(module, nn.Linear) and module.in_features == width and module.bias is not None
            return path if sound else None
    return None


@lru_cache(maxsize=4)
def evidence_of(observation: Observation, schema: Schema, counts: tuple[float, ...]) -> Evidence | None:
    """Infer each column's categories and means from the first layer's gradient; ``None`` if that is missing.

    With d_i the gradient that row x_i sends back, the weight's gradient is ``sum d_i x_i'`` and the bias' ``sum d_i``:
    a category's column without shift and scale sums d_i over its rows. In a young network a class's d_i are alike, so
    that the sum shows their number. ``counts`` (K,) are the known rows of each class.
    """
    path = first_linear(observation.model, schema.width)
    gradient = as_gradient(observation)
    if path is None or not {f"{path}.weight", f"{path}.bias"} <= gradient.keys():
        return None
    weight, bias = (gradient[f"{path}.{name}"].detach().cpu().double() for name in ("weight", "bias"))
    if not bool(bias.any()):
        return None
    shift, scale = schema.shift.double(), schema.scale.double()
    sums = weight * scale + bias[:, None] * shift
    large = weight.norm(dim=0) * scale + bias.norm() * shift.abs()
    present = sums.norm(dim=0) > _ROUNDING * large.clamp_min(_ROUNDING * bias.norm())
    present = _some_of_each(present, schema)
    shares = _posterior(sums, _usual_returns(observation, schema, path), schema, counts)
    return Evidence(present, _tidied(shares, schema, present))


def _some_of_each(present: Tensor, schema: Schema) -> Tensor:
    """Add to (F,) all numbers, and all categories of a column without any."""
    found = present.clone()
    found[schema.number_values] = True
    places, there = schema.groups
    for own, real in zip(places, there, strict=True):
        if not bool(found[own[real]].any()):
            found[own[real]] = True
    return found


def _usual_returns(observation: Observation, schema: Schema, path: str) -> Tensor:
    """Return the gradients (K, N, M) that random rows send back under each class's loss."""
    sent = observation.assumed()
    like = next(iter(sent.parameters.values()))
    model = frozen_copy(observation.model, sent, observation.plan, device=like.device, dtype=torch.float32).eval()
    rows, loss = schema.drawn(_DRAWN, torch.Generator().manual_seed(0)).to(like.device), observation.loss
    found: list[Tensor] = []
    with torch.enable_grad(), leaving({path: model.get_submodule(path)}) as calls:
        outputs = model(rows.requires_grad_())
        for label in range(observation.num_classes):
            answer = (loss or CROSS_ENTROPY)(outputs, torch.full((len(rows),), label, device=like.device))
            found.append(torch.autograd.grad(answer, calls[0].output, retain_graph=True)[0])
    return observation.plan.loss_scale * len(rows) * torch.stack(found).detach().cpu().double()


def _posterior(sums: Tensor, returns: Tensor, schema: Schema, counts: Sequence[float]) -> Tensor:
    """Estimate shares of categories and means of numbers, (K, F), in each class, by ``sums`` (M, F).

    A Gaussian model: prior counts of rows, and mean and covariance of ``returns`` (K, N, M).
    """
    classes, size, usual = len(returns), sum(counts), schema.usual.double()
    means = returns.mean(1) / size
    spread = (returns - returns.mean(1, keepdim=True)).flatten(0, 1) / size
    noise = spread.T @ spread / len(spread) + 1e-12 * means.square().sum() * torch.eye(means.shape[1]).double()
    of_class = torch.tensor(counts, dtype=torch.float64).clamp_min(0.1)
    found = torch.empty(classes, sums.shape[1], dtype=torch.float64)
    root = torch.linalg.cholesky(noise + 1e-6 * noise.diagonal().mean() * torch.eye(len(noise)).double())
    white = torch.linalg.solve_triangular(root, torch.cat([means.T, sums], 1), upper=False)
    model, seen = white[:, :classes], white[:, classes:]
    categories = torch.ones(sums.shape[1], dtype=torch.bool)
    categories[schema.number_values] = False
    for place in range(sums.shape[1]):
        share = float(usual[place].clamp(0.005, 0.995)) if bool(categories[place]) else 1.0
        prior = of_class * (share if bool(categories[place]) else float(usual[place]))
        wide = of_class * share * (1.0 - share if bool(categories[place]) else 1.0)
        rows = max(1.0, share * size)
        precision = model.T @ model / rows + torch.diag(1 / wide)
        found[:, place] = torch.linalg.solve(precision, model.T @ seen[:, place] / rows + prior / wide)
    return (found / of_class[:, None]).float()


def _tidied(shares: Tensor, schema: Schema, present: Tensor) -> Tensor:
    """Turn (K, F) into shares that add up to 1 in a column, and numbers within bounds."""
    found = shares.clone()
    places, there = schema.groups
    if len(places):
        own = torch.where(there & present[places], shares[:, places].clamp(_LEAST, 1), 0.0)
        own = own / own.sum(-1, keepdim=True).clamp_min(1e-9)
        found[:, places[there]] = own[:, there]
    numbers, (low, high) = schema.number_values, schema.bounds
    means = (shares[:, numbers] - schema.shift[numbers]) / schema.scale[numbers]
    found[:, numbers] = means.clamp(-1, 1).maximum(low).minimum(high)
    return found
