"""What enters the last linear layer of a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.errors import UserError
from fl_privacy.types import ModelState


def find_head(model: nn.Module, state: ModelState, inputs: Tensor) -> str:
    """Name of the linear layer that makes the logits, found by watching one forward pass.

    It is the layer whose output the model returns; where the model changes that output on its way out, the last
    linear layer that was called.

    Raises:
        UserError: no linear layer is called.
    """
    with torch.no_grad(), watch_linear(model) as called:
        logits = _forward(model, state, inputs)
    if not called:
        raise UserError(
            "Soteria expects a model that ends in a linear layer, but no torch.nn.Linear is called;"
            " choose another model or defense."
        )
    return maker_of(logits, called)


def maker_of(logits: Tensor, called: Sequence[tuple[str, Tensor]]) -> str:
    """Name of the layer of ``called``, at least one, that made ``logits``; the last where it is none of their own."""
    return next((name for name, output in reversed(called) if output is logits), called[-1][0])


@contextmanager
def watch_linear(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Name and output of each call of a linear layer within the context."""
    called: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: called.append((name, output)))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def representation(model: nn.Module, state: ModelState, inputs: Tensor, head: str) -> Tensor:
    """(B, D) what enters the layer ``head``, differentiable by ``inputs``.

    The model is in evaluation mode, as in Soteria's code, so that an example's features are its own.
    """
    with capture_input(model.get_submodule(head)) as captured:
        _forward(model, state, inputs)
    features = captured[-1]
    if features.dim() != 2:
        raise UserError(
            f"Soteria expects one vector an example in front of the layer {head}, but it gets the shape"
            f" {tuple(features.shape)}; choose another model or defense."
        )
    return features


@contextmanager
def capture_input(module: nn.Module) -> Iterator[list[Tensor]]:
    """What enters ``module`` at each of its calls within the context."""
    captured: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
    try:
        yield captured
    finally:
        handle.remove()


@contextmanager
def capture_output(module: nn.Module) -> Iterator[list[Tensor]]:
    """What ``module`` returns at each of its calls within the context."""
    captured: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, __, output: captured.append(output))
    try:
        yield captured
    finally:
        handle.remove()


def _forward(model: nn.Module, state: ModelState, inputs: Tensor) -> Tensor:
    model.eval()
    values = {name: t.detach() for name, t in {**state.parameters, **state.buffers}.items()}
    logits: Tensor = functional_call(model, values, (inputs,))
    return logits
