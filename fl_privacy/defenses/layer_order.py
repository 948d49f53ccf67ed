"""Which layer comes when."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.gradients.watch import entering, owners
from fl_privacy.types import ModelState


def layer_depths(model: nn.Module, state: ModelState, inputs: Tensor) -> dict[str, int]:
    """Parameter name -> number of its layer, from 1 in the order of the forward pass.

    A layer is a module that owns parameters, so that weight and bias share a number; found by watching one pass. Layers
    that are not called come last.

    Args:
        model: architecture.
        state: its values.
        inputs: (B, ...) a few examples.
    """
    layers = owners(model)
    model.eval()
    values = {name: t.detach() for name, t in {**state.parameters, **state.buffers}.items()}
    with torch.no_grad(), entering(layers) as calls:
        functional_call(model, values, (inputs,))
    order = dict.fromkeys(call.name for call in calls)
    depths = {name: depth for depth, name in enumerate(order, start=1)}
    return {name: depths.get(name.rpartition(".")[0], len(layers)) for name in state.parameters}
