"""Which layer comes when."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

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
    owners = {name: m for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}
    called: dict[str, int] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, __, name=name: _note(called, name))
        for name, module in owners.items()
    ]
    model.eval()
    values = {name: t.detach() for name, t in {**state.parameters, **state.buffers}.items()}
    try:
        with torch.no_grad():
            functional_call(model, values, (inputs,))
    finally:
        for handle in handles:
            handle.remove()
    last = len(owners)
    return {name: called.get(name.rpartition(".")[0], last) for name in state.parameters}


def _note(called: dict[str, int], name: str) -> None:
    called.setdefault(name, len(called) + 1)
