"""Inner products of single examples' gradients with updates: no example's gradient is kept."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fl_privacy.gradients.examples import example_gradients
from fl_privacy.gradients.sketch import GradientSketch
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

_ELEMENTS = 1 << 25
"""Elements of gradients of single examples that are held at a time (128 MB of float32)."""


@torch.no_grad()
def gradient_products(
    model: nn.Module, state: ModelState, batch: Batch, directions: Sequence[Tensors], *, plan: LocalPlan
) -> tuple[Tensor, Tensor]:
    """How far each example's gradient points along each of several updates, and how long it is.

    Batch norm runs in evaluation mode, where an example has a gradient of its own.

    Args:
        model: architecture.
        state: its values.
        batch: B examples.
        directions: K updates by parameter name; what one lacks counts as zero.
        plan: of the clients.

    Returns:
        (B, K) inner products and (B,) squared norms, both over the parameters that any of ``directions`` has.
    """
    plan = replace(plan, batch_norm="eval", loss_scale=1.0)
    names = [name for name in state.parameters if any(name in direction for direction in directions)]
    stacked = {n: _stacked(n, state.parameters[n], directions) for n in names}
    elements = sum(p.numel() for p in state.parameters.values())
    products, squares = [], []
    at_once = max(1, _ELEMENTS // elements)
    for inputs, labels in zip(torch.split(batch.inputs, at_once), torch.split(batch.labels, at_once), strict=True):
        some = Batch(inputs, labels)
        gradients = example_gradients(model, state, some, plan=plan)
        flat = {name: gradients[name].reshape(len(gradients[name]), -1) for name in names}
        products.append(torch.stack([flat[name] @ stacked[name] for name in names]).sum(0))
        squares.append(torch.stack([flat[name].square().sum(1) for name in names]).sum(0))
    return torch.cat(products), torch.cat(squares)


def sketched_examples(
    model: nn.Module, state: ModelState, batch: Batch, plan: LocalPlan, sketch: GradientSketch
) -> Tensor:
    """(B, size) sketches of each example's gradient, batch norm in evaluation mode."""
    plan = replace(plan, batch_norm="eval", loss_scale=1.0)
    elements = sum(p.numel() for p in state.parameters.values())
    at_once, found = max(1, _ELEMENTS // elements), []
    with torch.no_grad():
        for inputs, labels in zip(torch.split(batch.inputs, at_once), torch.split(batch.labels, at_once), strict=True):
            gradients = example_gradients(model, state, Batch(inputs, labels), plan=plan)
            found.append(sketch({name: gradients[name] for name in sketch.names}))
    return torch.cat(found)


def _stacked(name: str, like: Tensor, directions: Sequence[Tensors]) -> Tensor:
    """(elements, K) of the parameter ``name``."""
    return torch.stack(
        [d[name].to(like).flatten() if name in d else torch.zeros_like(like).flatten() for d in directions], 1
    )
