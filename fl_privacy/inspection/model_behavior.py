"""How a model answers to a client's own examples: neurons that never fire, or for one of them; one that leads."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.gradients.watch import Call, leaving, owners
from fl_privacy.types import Batch, ModelState


@dataclass(frozen=True, eq=False)
class Behavior:
    """On a batch of B examples.

    Attributes:
        firing: by layer with a threshold, for each unit (U,) the share of examples and places where it lets a gradient
            through.
        alone: by such a layer, the share of its units that do for one example at most.
        leading: share of the gradient that reaches the features that comes from the one example that sends most.
    """

    firing: dict[str, Tensor]
    alone: dict[str, float]
    leading: float


@torch.no_grad()
def behavior_of(model: nn.Module, sent: ModelState, batch: Batch) -> Behavior:
    """How ``model`` with the values ``sent`` answers to ``batch``, in evaluation mode; one forward pass."""
    was_training = model.training
    model.eval()
    clipping = {n: m for n, m in model.named_modules() if isinstance(m, nn.ReLU | nn.ReLU6 | nn.Hardtanh)}
    with leaving({**owners(model), **clipping}) as calls:
        logits = functional_call(model, {**sent.parameters, **sent.buffers}, (batch.inputs,))
    model.train(was_training)
    passing = dict(_passing(calls))
    firing = {name: open.flatten(2).float().mean((0, 2)) for name, open in passing.items()}
    alone = {name: float((open.flatten(2).any(2).sum(0) <= 1).float().mean()) for name, open in passing.items()}
    return Behavior(firing, alone, _leading(logits, batch.labels, calls, model))


def _passing(calls: list[Call]) -> Iterator[tuple[str, Tensor]]:
    """(layer, (B, U, places) where it lets a gradient through) for each threshold that the batch went through."""
    for call in calls:
        kind, inputs = call.module, call.inputs
        if isinstance(kind, nn.Hardtanh):
            open = (inputs > kind.min_val) & (inputs < kind.max_val)
        elif isinstance(kind, nn.ReLU):
            open = inputs > 0
        else:
            continue
        yield call.name, open.flatten(2) if open.dim() > 2 else open[..., None]


def _leading(logits: Tensor, labels: Tensor, calls: list[Call], model: nn.Module) -> float:
    linear = [call for call in calls if isinstance(call.module, nn.Linear) and call.output.shape == logits.shape]
    if not linear or labels.dim() != 1:
        return 0.0
    errors = logits.softmax(1)
    errors[torch.arange(len(labels)), labels.long()] -= 1
    features = linear[-1].inputs.flatten(1)
    sizes = errors.norm(dim=1) * features.norm(dim=1)
    return float(sizes.max() / sizes.sum().clamp_min(1e-30))
