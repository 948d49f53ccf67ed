"""What enters the last linear layer of a model, and how much each feature changes with the input."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp

from fl_privacy.errors import UserError
from fl_privacy.gradients.memory import written_by
from fl_privacy.gradients.watch import Call, entering, leaving
from fl_privacy.progress import counted
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


Features = Callable[[Tensor], Tensor]
"""(B, ...) -> (B, D), each example by itself."""

_CHUNK_ELEMENTS = 1 << 18
"""Input elements of the products computed together: what bounds the memory."""

_KEPT_BYTES = 1 << 25
"""What the forward pass of backward products may write: of less, each product is over before it pays."""


def exact_row_norms(features: Features, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Norms ||d r_i / d x|| of every feature of every example, by backward products.

    One forward pass of several copies of the examples serves all products: in each, a copy takes a feature.

    Args:
        features: r, differentiable.
        inputs: x, (B, ...).

    Returns:
        (B, D) the norms and (B, D) the features.
    """
    size, one = len(inputs), inputs[:1].detach()
    with torch.no_grad():
        copies = _KEPT_BYTES // max(1, size * written_by(lambda: features(one)))
        copies = max(1, min(copies, features(one).shape[1]))
    x = _copied(inputs.detach(), copies).requires_grad_()
    with torch.enable_grad():
        r = features(x)
    rows = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
    norms = []
    for chunk in counted("sensitivity of features", torch.split(rows, copies)):
        cotangents = F.pad(chunk, (0, 0, 0, copies - len(chunk))).repeat_interleave(size, 0)
        (products,) = torch.autograd.grad(r, x, cotangents, retain_graph=True)
        norms.append(products.flatten(1).norm(dim=1).view(copies, size)[: len(chunk)])
    return torch.cat(norms).T, r[:size].detach()


def estimated_row_norms(
    features: Features, inputs: Tensor, *, directions: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The same norms from random forward products: E[(J v)_i^2] = ||J_i||^2 for v of independent signs.

    The cost does not depend on D. The relative error of one norm is about 1 / sqrt(2 directions).

    Args:
        features: r, differentiable in forward mode.
        inputs: x, (B, ...).
        directions: how many v, at least 1.
        rng: of the signs.

    Returns:
        (B, D) the norms and (B, D) the features.
    """
    x = inputs.detach()
    with torch.no_grad():
        r = features(x)
        squares = torch.zeros_like(r)
        for start in counted("sensitivity of features", range(0, directions, _chunk(inputs))):
            size = (min(_chunk(inputs), directions - start), *x.shape)
            signs = torch.randint(0, 2, size, generator=rng, device=rng.device).to(x) * 2 - 1
            tangents = jvp(features, (_copied(x, size[0]),), (signs.flatten(0, 1),))[1]
            squares += tangents.view(size[0], *r.shape).square().sum(0)
    return (squares / directions).sqrt(), r


def _copied(inputs: Tensor, copies: int) -> Tensor:
    """(copies B, ...)."""
    return inputs.repeat(copies, *(1 for _ in inputs.shape[1:]))


def _chunk(inputs: Tensor) -> int:
    """How many copies."""
    return max(1, _CHUNK_ELEMENTS // inputs.numel())
