"""Gradients of single examples, their clipped sum, inner products and sketches."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fl_privacy.errors import UserError
from fl_privacy.models.gradients import victims
from fl_privacy.models.gradients.choose_method import same_gradients
from fl_privacy.models.gradients.layered import LayerCall, Layered, add_up, parameter_gradients, pays, weight_factors
from fl_privacy.models.layers import has_batch_norm
from fl_privacy.models.unwrap_model import without_checkpointing
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

RANK, STEPS = 256, 200  # most principal directions of a classifier's inputs, and number of its training steps
SKETCH = 4096  # length of a sketch, which keeps inner products to about 2 %


@dataclass(frozen=True, eq=False)
class GradientSketch:
    """Linear map from gradients to short vectors that keeps inner products (count sketch, Charikar et al. 2002)."""

    names: tuple[str, ...]
    buckets: Tensor  # (P,) index in the short vector to which each of a gradient's P elements is added
    signs: Tensor  # (P,) sign with which each element is added, 1 or -1
    size: int  # length of the short vector

    @classmethod
    def of(cls, shapes: Tensors, rng: torch.Generator, size: int = SKETCH) -> "GradientSketch":
        """Draw a sketch for gradients shaped like ``shapes``; for at most ``size`` elements, it is the identity."""
        elements = sum(t.numel() for t in shapes.values())
        device = next(iter(shapes.values())).device
        if elements <= size:
            unchanged = torch.arange(elements, device=device), torch.ones(elements, device=device)
            return cls(tuple(shapes), *unchanged, elements)
        buckets = torch.randint(size, (elements,), generator=rng, device=rng.device)
        signs = 2.0 * torch.randint(2, (elements,), generator=rng, device=rng.device) - 1
        return cls(tuple(shapes), buckets.to(device), signs.to(device), size)

    def __call__(self, gradients: Tensors) -> Tensor:
        found = torch.zeros(len(next(iter(gradients.values()))), self.size, device=self.signs.device)
        for name, part in self._parts(gradients):
            values = gradients[name].reshape(len(gradients[name]), -1) * self.signs[part]
            found = found.index_add(1, self.buckets[part], values)
        return found

    def back(self, sketched: Tensor, like: Tensors) -> Tensors:
        """Map ``sketched`` (size,) back to gradients shaped like ``like``, by the transposed matrix of the sketch."""
        parts = self._parts({name: value.unsqueeze(0) for name, value in like.items()})
        return {n: (sketched[self.buckets[p]] * self.signs[p]).reshape(like[n].shape) for n, p in parts}

    def _parts(self, gradients: Tensors) -> Sequence[tuple[str, slice]]:
        ends = accumulate((gradients[name][0].numel() for name in self.names), initial=0)
        return [(name, slice(*pair)) for name, pair in zip(self.names, pairwise(ends), strict=True)]


@dataclass(frozen=True, eq=False)
class GradientClassifier:
    """Classifier (B, F) -> logits (B, A): predicts which of A values an attribute has from the direction of a gradient.

    Gradients are compressed to F numbers by a :class:`GradientSketch`.
    """

    mean: Tensor  # (F,) mean of the training inputs, each scaled to norm 1
    basis: Tensor  # (F, R) principal directions of these inputs, scaled
    head: nn.Module

    def __call__(self, sketched: Tensor) -> Tensor:
        return cast(Tensor, self.head((_directions(sketched) - self.mean) @ self.basis))

    @classmethod
    def fit(
        cls,
        sketched: Tensor,
        labels: Tensor,
        classes: int,
        rng: torch.Generator,
        *,
        hidden: int = 0,
        steps: int = STEPS,
    ) -> "GradientClassifier":
        """Return a classifier trained on sketched gradients (N, F) with ``labels`` (N,) in [0, classes).

        ``hidden`` is the width of a hidden layer, 0 for none; each of ``steps`` uses all examples.
        """
        directions = _directions(sketched).detach()
        mean = directions.mean(0)
        _, spread, right = torch.linalg.svd(directions - mean, full_matrices=False)
        rank = min(RANK, int((spread > 1e-5 * spread[0]).sum()))
        basis = right[:rank].T * (math.sqrt(len(directions)) / spread[0].clamp(min=1e-12))
        head = _head([rank, *([hidden] if hidden else []), classes], rng, directions.device)
        trained = list(head.parameters())
        optimizer = torch.optim.Adam(trained, lr=0.01, weight_decay=1e-3)
        inputs = (directions - mean) @ basis
        with torch.enable_grad():
            for _ in range(steps):
                loss = F.cross_entropy(head(inputs), labels)
                for parameter, slope in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    parameter.grad = slope
                optimizer.step()
        return cls(mean, basis, head.requires_grad_(False))


def _head(widths: Sequence[int], rng: torch.Generator, device: torch.device) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layer = nn.Linear(inner, outer, device="meta").to_empty(device=device)
        for parameter in layer.parameters():
            drawn = torch.rand(parameter.shape, generator=rng, device=rng.device).to(parameter)
            parameter.data.copy_((2 * drawn - 1) / math.sqrt(inner))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _directions(sketched: Tensor) -> Tensor:
    return cast(Tensor, sketched / torch.linalg.vector_norm(sketched, dim=1, keepdim=True).clamp(min=1e-12))


_CHUNK_ELEMENTS = 1 << 26  # most elements of per-example gradients at once (256 MB of float32)

_tried: "WeakKeyDictionary[nn.Module, dict[frozenset[str], bool]]" = WeakKeyDictionary()
"""Model -> names of parameters -> ``True`` if :class:`Layered` gives the right gradients with respect to these."""


@without_checkpointing()
def example_gradients(
    model: nn.Module, state: ModelState, batch: Batch, *, plan: LocalPlan, changes: Sequence[victims.LossChange] = ()
) -> Tensors:
    """Return each example's differentiable loss gradient (B, *shape) by name; ``changes``: a defense's, of the loss."""
    names = list(state.parameters)
    layered = _layered(model, state, batch, plan, changes, names=names)
    if layered is not None:
        return layered(batch.inputs.unsqueeze(1), batch.labels.unsqueeze(1))
    return _one_by_one(model, state, batch, plan, changes, names=names)[0]


@without_checkpointing()
@torch.no_grad()
def clipped_sum(
    model: nn.Module,
    state: ModelState,
    batch: Batch,
    clip_norm: float,
    *,
    plan: LocalPlan,
    changes: Sequence[victims.LossChange] = (),
    held: Collection[str] = (),
) -> tuple[Tensors, Tensor]:
    """Return the sum of examples' gradients, each clipped to the l2 norm ``clip_norm``, and the mean loss.

    ``changes``: a defense's changes of the loss. Parameters in ``held`` are left out. An example whose gradient's norm
    is not finite adds nothing to the sum; an empty batch gives 0. ``UserError`` if batch norm mixes examples, or no
    parameter is trained.
    """
    if plan.batch_norm == "train" and has_batch_norm(model):
        raise UserError(
            "Per-sample clipping expects each example to have its own gradient, but the model normalizes by the batch;"
            " set federation.plan.batch_norm=eval or take a model with group norm."
        )
    if set(state.parameters) <= set(held):
        raise UserError("Per-sample clipping expects a trained parameter, but all are frozen; shorten plan.frozen.")
    trained = {name: p for name, p in state.parameters.items() if name not in held}
    # norms without forming the gradients, if faster (ghost clipping, Li et al. 2022, Sec. 4)
    layered = _layered(model, state, batch, plan, changes, names=list(trained))
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    loss = torch.zeros((), device=batch.inputs.device)
    elements = sum(p.numel() for p in trained.values())
    if layered is not None:
        for some in _chunks(batch, _formed_elements(layered, batch, elements)):
            found, losses = _ghost_clipped_sum(layered, some, clip_norm)
            add_up(total, {name: name for name in total}, found)
            loss = loss + losses
        return total, loss / len(batch)
    for some in _chunks(batch, elements):
        gradients, losses = _one_by_one(model, state, some, plan, changes, names=list(trained))
        loss = loss + losses.sum()
        factors = _factors([_squares(g) for g in gradients.values()], clip_norm)
        for name, g in gradients.items():
            total[name] += _weighted(factors, g)
    return total, loss / max(1, len(batch))


def _one_by_one(
    model: nn.Module,
    state: ModelState,
    batch: Batch,
    plan: LocalPlan,
    changes: Sequence[victims.LossChange],
    *,
    names: Sequence[str],
) -> tuple[Tensors, Tensor]:
    values = {name: state.parameters[name].detach() for name in names}
    if not len(batch):
        none = {name: value.new_zeros(0, *value.shape) for name, value in values.items()}
        return none, torch.zeros(0, device=batch.inputs.device)
    rest = {name: p.detach() for name, p in state.parameters.items() if name not in names}
    how: dict[str, Any] = {"batch_norm": plan.batch_norm, "loss_scale": plan.loss_scale, "changes": changes}

    def loss(values: Tensors, image: Tensor, label: Tensor) -> Tensor:
        one = Batch(image.unsqueeze(0), label.unsqueeze(0))
        return victims.batch_loss(model, ModelState({**rest, **values}, state.buffers), one, **how)[0]

    per_example = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
    try:
        with victims.plain_attention():
            found: tuple[Tensors, Tensor] = per_example(values, batch.inputs, batch.labels)
    except RuntimeError:  # recurrent layers and inner autograd calls, among others, can't be batched
        pairs = zip(torch.split(batch.inputs, 1), torch.split(batch.labels, 1), strict=True)
        each = [victims.loss_gradients(model, state, Batch(*p), **how, create_graph=p[0].requires_grad) for p in pairs]
        gradients = {name: torch.stack([own.gradients[name].to_dense() for own in each]) for name in values}
        return gradients, torch.stack([own.loss for own in each])
    return found


def _layered(
    model: nn.Module,
    state: ModelState,
    batch: Batch,
    plan: LocalPlan,
    changes: Sequence[victims.LossChange],
    *,
    names: Sequence[str],
) -> Layered | None:
    # None if the model is unsupported, or wrong in a test run
    if not len(batch) or changes or victims.drops_out(model):
        return None
    tried, wanted = _tried.setdefault(model, {}), frozenset(names)
    right = tried.get(wanted)
    if right is False:
        return None
    value = next(iter(state.parameters.values()))
    detached = ModelState({name: p.detach() for name, p in state.parameters.items()}, state.buffers)
    frozen = victims.frozen_copy(model, detached, plan, device=value.device, dtype=value.dtype)
    try:
        layered = Layered(victims.VictimModel(frozen, names, plan))
        if right is None:
            # at most two examples of zeros and ones, valid for any modality; real ones must not affect the time
            inputs, labels = batch.inputs[:2].detach(), torch.zeros_like(batch.labels[:2])
            labels[..., 0] = 1
            few = Batch(torch.rand(inputs.shape, generator=torch.Generator().manual_seed(0)).round().to(inputs), labels)
            with torch.no_grad():
                layered.expect_right_factors(few.inputs.unsqueeze(1), few.labels.unsqueeze(1))
                found = layered(few.inputs.unsqueeze(1), few.labels.unsqueeze(1))
            right = same_gradients(found, _one_by_one(model, detached, few, plan, (), names=names)[0])
    except (RuntimeError, AttributeError):
        right = False
    if len(batch) > 1 or not right:  # a single example does not tell whether examples are mixed
        tried[wanted] = right
    return layered if right else None


def _chunks(batch: Batch, elements: int, *, most: int = _CHUNK_ELEMENTS) -> Iterator[Batch]:
    at_once = max(1, most // max(1, elements))
    for inputs, labels in zip(torch.split(batch.inputs, at_once), torch.split(batch.labels, at_once), strict=True):
        yield Batch(inputs, labels)


def _formed_elements(layered: Layered, batch: Batch, most: int) -> int:
    if most * len(batch) <= _CHUNK_ELEMENTS:
        return most
    calls = layered.calls(batch.inputs[:1].unsqueeze(1), batch.labels[:1].unsqueeze(1))
    formed = {name: call.module.get_parameter(own).numel() for call in calls for own, name in call.names.items()}
    ghosts = {call.names["weight"] for call in calls if "weight" in call.names and _ghost_norms(call, 1.0) is not None}
    return sum(size for name, size in formed.items() if name not in ghosts)


def _ghost_clipped_sum(layered: Layered, batch: Batch, clip_norm: float) -> tuple[Tensors, Tensor]:
    loss, calls = layered.passed(batch.inputs.unsqueeze(1), batch.labels.unsqueeze(1))
    uses = Counter(name for call in calls for name in call.names.values())
    formed: dict[str, Tensor] = {}
    squares: list[Tensor] = []
    summed: list[LayerCall] = []
    for call in calls:
        own = dict(call.names)
        if uses[own.get("weight", "")] == 1 and (ghost := _ghost_norms(call, clip_norm)) is not None:
            squares.append(ghost)
            summed.append(replace(call, names={"weight": own.pop("weight")}))
        add_up(formed, own, parameter_gradients(call, own.keys()))
    squares += [_squares(gradient) for gradient in formed.values()]
    factors = _factors(squares, clip_norm)
    total = {name: _weighted(factors, gradient) for name, gradient in formed.items()}
    for call in summed:
        inputs, deltas = (_without_left_out(values, factors) for values in (call.inputs, call.deltas))
        whole = replace(call, inputs=inputs, deltas=deltas).weighted_sum(factors)
        add_up(total, call.names, {"weight": parameter_gradients(whole, ["weight"])["weight"][0]})
    return total, loss


_ROUNDING = 1e-6  # rounding of inner products in single precision, relative to the product of their factors' norms


def _ghost_norms(call: LayerCall, clip_norm: float) -> Tensor | None:
    # (B,) squared; None if forming gradients is faster
    weight = call.module.get_parameter("weight")
    if weight.dim() < 2 or not pays(len(weight), weight[0].numel(), call.positions):
        return None
    factors = weight_factors(call)
    if factors is None:
        return None
    deltas, columns = factors
    products = ((deltas.mT @ deltas) * (columns.mT @ columns)).sum((1, 2)).clamp_min(0)
    error = _ROUNDING * _squares(deltas) * _squares(columns)
    return products + torch.where(error > 0.01 * clip_norm**2, error, 0)


def _squares(gradient: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(gradient.reshape(len(gradient), math.prod(gradient.shape[1:])), dim=1)
    return norms.square()


def _factors(squares: Sequence[Tensor], clip_norm: float) -> Tensor:
    """Return the clipping factors (B,) min(1, clip_norm / norm), 0 if not finite, from squared norms of tensors."""
    norms = torch.stack(list(squares)).sum(0).sqrt()
    return torch.where(norms.isfinite(), (clip_norm / norms).clamp(max=1.0), 0)


def _weighted(factors: Tensor, gradient: Tensor) -> Tensor:
    return cast(Tensor, torch.tensordot(factors.to(gradient), _without_left_out(gradient, factors), dims=1))


def _without_left_out(values: Tensor, factors: Tensor) -> Tensor:
    return torch.where((factors > 0).view(-1, *(1 for _ in values.shape[1:])), values, 0)


_ELEMENTS = 1 << 25  # most elements of single examples' gradients at once (128 MB of float32)


def _in_chunks(model: nn.Module, state: ModelState, batch: Batch, plan: LocalPlan) -> Iterator[Tensors]:
    plan, elements = replace(plan, batch_norm="eval", loss_scale=1.0), sum(p.numel() for p in state.parameters.values())
    for some in _chunks(batch, elements, most=_ELEMENTS):
        yield example_gradients(model, state, some, plan=plan)


@without_checkpointing()
@torch.no_grad()
def gradient_products(
    model: nn.Module, state: ModelState, batch: Batch, directions: Sequence[Tensors], *, plan: LocalPlan
) -> tuple[Tensor, Tensor]:
    """Return inner products (B, K) of each example's gradient with K ``directions``, and gradients' squared norms (B,).

    Parameters that are in no direction are left out; those missing in one direction are 0 there.
    """
    names = [name for name in state.parameters if any(name in direction for direction in directions)]
    stacked = {}
    for name, like in ((name, state.parameters[name]) for name in names):
        columns = [d[name].to(like) if name in d else torch.zeros_like(like) for d in directions]
        stacked[name] = torch.stack([column.flatten() for column in columns], 1)
    products, squares = [], []
    for gradients in _in_chunks(model, state, batch, plan):
        flat = {name: gradients[name].reshape(len(gradients[name]), -1) for name in names}
        products.append(torch.stack([flat[name] @ stacked[name] for name in names]).sum(0))
        squares.append(torch.stack([flat[name].square().sum(1) for name in names]).sum(0))
    return torch.cat(products), torch.cat(squares)


@without_checkpointing()
@torch.no_grad()
def sketched_examples(
    model: nn.Module, state: ModelState, batch: Batch, plan: LocalPlan, sketch: GradientSketch
) -> Tensor:
    """Return the sketch (B, size) of each example's gradient, with batch norm in evaluation mode."""
    chunks = _in_chunks(model, state, batch, plan)
    return torch.cat([sketch({name: gradients[name] for name in sketch.names}) for gradients in chunks])
