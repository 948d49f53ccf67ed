"""What enters the last linear layer of a model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.errors import UserError
from fl_privacy.gradients.watch import Call, entering, leaving
from fl_privacy.types import ModelState


def find_head(model: nn.Module, state: ModelState, inputs: Tensor) -> str:
    """Name of the linear layer that makes the logits, found by watching one forward pass.

    It is the layer whose output the model returns; where the model changes that output on its way out, the last
    linear layer that was called.

    Raises:
        UserError: no linear layer is called.
    """
    with torch.no_grad(), leaving(linear_layers(model)) as calls:
        logits = _forward(model, state, inputs)
    if not calls:
        raise UserError(
            "Soteria expects a model that ends in a linear layer, but no torch.nn.Linear is called;"
            " choose another model or defense."
        )
    return maker_of(logits, calls)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def maker_of(logits: Tensor, calls: Sequence[Call]) -> str:
    """Name of the layer of ``calls``, at least one, that made ``logits``; the last where it is none of their own."""
    return next((call.name for call in reversed(calls) if call.output is logits), calls[-1].name)


def representation(model: nn.Module, state: ModelState, inputs: Tensor, head: str) -> Tensor:
    """(B, D) what enters the layer ``head``, differentiable by ``inputs``.

    The model is in evaluation mode, as in Soteria's code, so that an example's features are its own.
    """
    with entering({head: model.get_submodule(head)}) as calls:
        _forward(model, state, inputs)
    features = calls[-1].inputs
    if features.dim() != 2:
        raise UserError(
            f"Soteria expects one vector an example in front of the layer {head}, but it gets the shape"
            f" {tuple(features.shape)}; choose another model or defense."
        )
    return features


def _forward(model: nn.Module, state: ModelState, inputs: Tensor) -> Tensor:
    model.eval()
    values = {name: t.detach() for name, t in {**state.parameters, **state.buffers}.items()}
    logits: Tensor = functional_call(model, values, (inputs,))
    return logits
