"""Client-side guard: refusal of models whose structure, weights or behavior suggest a malicious server."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError
from fl_privacy.models.gradients.hooks import leaving, owners
from fl_privacy.types import Batch, ModelState


@dataclass(frozen=True)
class Architecture:
    """Architecture of a model: shapes of its tensors and class names of its modules, by name."""

    tensors: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "Architecture":
        values = [*model.named_parameters(), *model.named_buffers()]
        modules = {name: type(module).__name__ for name, module in model.named_modules()}
        return cls({name: tuple(value.shape) for name, value in values}, modules)

    def difference(self, other: "Architecture") -> str | None:
        for mine, theirs in ((self.modules, other.modules), (self.tensors, other.tensors)):
            if more := [name for name in theirs if name not in mine]:
                return f"it has {more[0]}, which was not agreed on"
            if less := [name for name in mine if name not in theirs]:
                return f"it lacks {less[0]}"
            if changed := [name for name in mine if mine[name] != theirs[name]]:
                name = changed[0]
                return f"{name or 'the model'} is {theirs[name]}, agreed on was {mine[name]}"
        return None


_LEAST_ROWS, _LEAST_INPUTS = 8, 8  # least rows and columns of a checked tensor; smaller ones are alike by chance
_SAMPLED = 32  # number of rows compared with each other
_PARALLEL = 0.95
_IDENTITY = 0.999
_MANY = 0.25  # tolerated share of suspicious rows; an imprint layer has nearly all


def strange_structure(name: str, weight: Tensor) -> str | None:
    """Return a phrase on what looks crafted in ``weight`` (outputs, ...), or ``None``.

    Suspicious are values that are not finite, rows equal up to sign and scale (imprint), zero rows (class fishing), and
    kernels with a single nonzero value, which copy the image. ``name``: parameter's name in the phrase.
    """
    if weight.dim() < 2 or len(weight) < _LEAST_ROWS or weight[0].numel() < _LEAST_INPUTS:
        return None
    rows = weight.detach().flatten(1).float()
    lengths = rows.norm(dim=1)
    if not lengths.isfinite().all() or not lengths.any():
        return f"{name} is {'zero' if lengths.isfinite().all() else 'not finite'}"
    silent = (lengths <= 1e-6 * lengths.max()).float().mean()
    if silent > _MANY:
        return f"{silent:.0%} of the rows of {name} are zero"
    if weight.dim() == 4 and weight[0, 0].numel() > 1:
        copies = (rows.abs().amax(1) > _IDENTITY * lengths.clamp_min(1e-30)).float().mean()
        if copies > _MANY:
            return f"{copies:.0%} of the kernels of {name} copy a channel"
    some = rows[torch.linspace(0, len(rows) - 1, min(_SAMPLED, len(rows))).long()]
    some = some / some.norm(dim=1, keepdim=True).clamp_min(1e-30)
    repeated = ((some @ some.T).abs().fill_diagonal_(0).amax(1) > _PARALLEL).float().mean()
    if repeated > _MANY:
        return f"{repeated:.0%} of the rows of {name} are the same up to scale"
    return None


@dataclass(frozen=True, eq=False)
class Behavior:
    """Activations of a model on a batch: how often each unit is active, and how many are so for one example only."""

    firing: dict[str, Tensor]  # ReLU or Hardtanh -> share (U,) of examples and positions at which a unit is active
    alone: dict[str, float]  # share of units active for at most one example, by the same names
    leading: float  # largest share of an example in the gradient of the features


@torch.no_grad()
def behavior_of(model: nn.Module, sent: ModelState, batch: Batch) -> Behavior:
    """Return the activations on ``batch`` of ``model``, with the values ``sent`` and in evaluation mode."""
    was_training = model.training
    model.eval()
    clipping = {n: m for n, m in model.named_modules() if isinstance(m, nn.ReLU | nn.ReLU6 | nn.Hardtanh)}
    with leaving({**owners(model), **clipping}) as calls:
        logits = functional_call(model, {**sent.parameters, **sent.buffers}, (batch.inputs,))
    model.train(was_training)
    passing = {}  # name of each threshold layer -> mask of passed gradients, (B, U, places)
    for call in calls:
        kind, inputs = call.module, call.inputs
        if isinstance(kind, nn.Hardtanh):
            open = (inputs > kind.min_val) & (inputs < kind.max_val)
        elif isinstance(kind, nn.ReLU):
            open = inputs > 0
        else:
            continue
        passing[call.name] = open.flatten(2) if open.dim() > 2 else open[..., None]
    firing = {name: open.flatten(2).float().mean((0, 2)) for name, open in passing.items()}
    alone = {name: float((open.flatten(2).any(2).sum(0) <= 1).float().mean()) for name, open in passing.items()}
    leading, labels = 0.0, batch.labels
    linear = [call for call in calls if isinstance(call.module, nn.Linear) and call.output.shape == logits.shape]
    if linear and labels.dim() == 1:
        errors = logits.softmax(1)
        errors[torch.arange(len(labels)), labels.long()] -= 1
        sizes = errors.norm(dim=1) * linear[-1].inputs.flatten(1).norm(dim=1)
        leading = float(sizes.max() / sizes.sum().clamp_min(1e-30))
    return Behavior(firing, alone, leading)


LAST = "guard/"  # prefix of the last accepted model's values in a client's state
_LEAST_VALUES = 64  # least number of values of a tensor that is compared with the last one
_LEAST_EXAMPLES = 8  # least number of examples for the checks ``alone`` and ``leading``


class RefusedModelError(UserError):
    """Raised if a client's guard refuses a model; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class ModelGuard:
    """Conditions on a model before a client trains it; a server that knows them can meet them all."""

    examples: int = 16  # number of the client's examples on which a model is checked
    dead: float = 0.04  # least mean share of examples for which a layer's units are active
    alone: float = 0.35  # largest share of the first ReLU layer's units that are active for at most one example
    alone_later: float = 0.6  # same share for later layers, which honest training makes sparser
    leading: float = 0.7  # largest share of the gradient that a single example may have
    turned: float = 0.3  # least cosine of a weight to that of the last accepted model
    grown: float = 5.0  # largest ratio of a weight's norm to that of the last accepted model
    agreed: Architecture | None = field(init=False, default=None)  # expected, from ``agreeing_on``; ``None``: any

    def __post_init__(self) -> None:
        whole("guard.examples", self.examples, at_least=2, example=16)
        number("guard.dead", self.dead, at_least=0, below=1, example=0.04)
        number("guard.alone", self.alone, above=0, at_most=1, example=0.35)
        number("guard.alone_later", self.alone_later, above=0, at_most=1, example=0.6)
        number("guard.leading", self.leading, above=0, at_most=1, example=0.7)
        number("guard.turned", self.turned, at_least=-1, below=1, example=0.3)
        number("guard.grown", self.grown, above=1, infinite=True, example=5.0)

    def agreeing_on(self, model: nn.Module) -> Self:
        known = copy.copy(self)
        object.__setattr__(known, "agreed", Architecture.of(model))
        return known

    def refusal(self, model: nn.Module, sent: ModelState, batch: Batch, kept: Mapping[str, Tensor]) -> str | None:
        """Return the reason not to train the model with the values ``sent``; ``None`` if nothing is suspicious.

        ``kept``: tensors of the client's state, which hold the last accepted model.
        """
        if self.agreed and (different := self.agreed.difference(Architecture.of(model))):
            return f"its architecture is not the one agreed on: {different}"
        if reason := self.refusal_of_weights(sent, kept):
            return reason
        return self._misbehaved(model, sent, Batch(batch.inputs[: self.examples], batch.labels[: self.examples]))

    def refusal_of_weights(self, sent: ModelState, kept: Mapping[str, Tensor]) -> str | None:
        strange = next(filter(None, (strange_structure(n, p) for n, p in sent.parameters.items())), None)
        return strange or self._far(sent, kept)

    def expect_honest(self, model: nn.Module, sent: ModelState, batch: Batch, kept: Mapping[str, Tensor]) -> None:
        if reason := self.refusal(model, sent, batch, kept):
            raise RefusedModelError(f"The model was refused: {reason}; loosen the guard only for a trusted server.")

    def remembered(self, sent: ModelState) -> dict[str, Tensor]:
        return {LAST + name: p.detach().clone() for name, p in sent.parameters.items()}

    def _far(self, sent: ModelState, kept: Mapping[str, Tensor]) -> str | None:
        for name, new in sent.parameters.items():
            old = kept.get(LAST + name)
            if old is None or new.dim() < 2 or new.numel() < _LEAST_VALUES or old.shape != new.shape:
                continue
            flat, before = new.detach().flatten(), old.to(new).flatten()
            length, former = float(flat.dot(flat)) ** 0.5, float(before.dot(before)) ** 0.5
            if length > self.grown * former > 0:
                return f"{name} is {length / former:.1f} times as large as in the round before"
            cosine = float(flat.dot(before)) / max(length * former, 1e-30)
            if former > 0 and cosine < self.turned:
                return f"{name} was replaced since the round before (cosine {cosine:.2f})"
        return None

    def _misbehaved(self, model: nn.Module, sent: ModelState, batch: Batch) -> str | None:
        if not sent.parameters.keys() >= dict(model.named_parameters()).keys() or len(batch) < 2:
            return None
        seen, few = behavior_of(model, sent, batch), len(batch) < _LEAST_EXAMPLES
        for place, (name, firing) in enumerate(seen.firing.items()):
            if float(firing.mean()) < self.dead:
                return f"{name} lets {float(firing.mean()):.1%} of this client's examples through"
            if few:
                continue
            if seen.alone[name] > (self.alone_later if place else self.alone):
                return f"{seen.alone[name]:.0%} of the units of {name} fire for one of {len(batch)} examples or none"
        if seen.leading > self.leading and not few:
            return f"one of {len(batch)} examples sends {seen.leading:.0%} of the gradient"
        return None
