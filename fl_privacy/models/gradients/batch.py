"""Gradient of a batch, shared by clients, defenses and reference attacks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.models.unwrap_model import without_checkpointing
from fl_privacy.types import Batch, ModelState, Tensors

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, K), labels (B,) or (B, K)) -> scalar."""

LossChange = Callable[[nn.Module, Tensors, Batch], AbstractContextManager[Callable[[Tensor], Tensor]]]
"""(model, values by name, batch) -> context around the forward pass, which may observe modules and gives a function
(loss) -> loss, called once after the pass."""


@dataclass(frozen=True, eq=False)
class GradientResult:
    """Loss of a batch, its gradient by parameter name, and the buffers after the forward pass."""

    loss: Tensor
    gradients: Tensors
    buffers: Tensors


def set_mode(model: nn.Module, batch_norm: Literal["train", "eval"] | None) -> None:
    """Set training mode, with batch norm at its running statistics for ``eval``; ``None`` changes nothing."""
    if batch_norm is None:
        return
    model.train()
    if batch_norm == "eval":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def drops_out(model: nn.Module) -> bool:
    """Return ``True`` if a layer of ``model`` has dropout, whose masks are secret."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())


class LossOptions(TypedDict, total=False):
    """Options of a batch's loss, with those of :func:`batch_loss` by default."""

    batch_norm: Literal["train", "eval"] | None
    loss_scale: float
    loss_function: LossFunction
    changes: Sequence[LossChange]


@without_checkpointing()
def batch_loss(
    model: nn.Module,
    state: ModelState,
    batch: Batch,
    *,
    batch_norm: Literal["train", "eval"] | None = "train",
    loss_scale: float = 1.0,
    loss_function: LossFunction = F.cross_entropy,
    changes: Sequence[LossChange] = (),
) -> tuple[Tensor, Tensors]:
    """Compute the scaled mean loss of ``batch`` at ``state``, which is not changed, and the buffers after the pass."""
    set_mode(model, batch_norm)
    buffers = {name: b.clone() for name, b in state.buffers.items()}
    values = {**state.parameters, **buffers}
    with ExitStack() as spanned:
        changed = [spanned.enter_context(change(model, values, batch)) for change in changes]
        loss = loss_function(functional_call(model, values, (batch.inputs,)), batch.labels)
        for change in changed:
            loss = change(loss)
    return loss_scale * loss, buffers


def loss_gradients(
    model: nn.Module, state: ModelState, batch: Batch, *, create_graph: bool = False, **options: Unpack[LossOptions]
) -> GradientResult:
    """Compute the gradient of the loss by every parameter of ``state``, with loss and buffers.

    Unused parameters have zero gradients. ``create_graph`` allows differentiation by the inputs.
    """
    leaves = {name: p if p.requires_grad else p.detach().requires_grad_() for name, p in state.parameters.items()}
    with torch.enable_grad():
        loss, buffers = batch_loss(model, ModelState(leaves, state.buffers), batch, **options)
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    if not create_graph:
        loss = loss.detach()
    # An embedding may give a sparse gradient, which most of PyTorch does not support.
    dense = [gradient.to_dense() for gradient in gradients]
    return GradientResult(loss, dict(zip(leaves, dense, strict=True)), buffers)
