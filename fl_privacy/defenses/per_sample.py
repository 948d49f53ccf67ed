"""Gradients of single examples, clipped and added up."""

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fl_privacy.defenses.base import LocalStep
from fl_privacy.errors import UserError
from fl_privacy.gradients import batch_loss
from fl_privacy.types import Batch, ModelState, Tensors

_CHUNK_ELEMENTS = 1 << 26
"""Elements of per-sample gradients held at a time (256 MB of float32)."""


def clipped_gradient_sum(step: LocalStep, clip_norm: float) -> Tensors:
    """Sum over the batch of each example's gradient scaled by min(1, clip_norm / its l2 norm).

    The gradients come from one vectorized backward pass for as many examples as fit into 256 MB.

    Args:
        step: where; its loss scale and batch-norm mode hold.
        clip_norm: bound C on the norm of one example's gradient over all parameters, above 0.

    Raises:
        UserError: the model has batch-norm layers in training mode: there, no example has a gradient of its own.
    """
    if step.plan.batch_norm == "train" and any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in step.model.modules()
    ):
        raise UserError(
            "Per-sample clipping expects each example to have its own gradient, but the model normalizes by the batch;"
            " set federation.plan.batch_norm=eval or take a model with group norm."
        )
    parameters = {name: p.detach() for name, p in step.sent.parameters.items()}

    def loss(values: Tensors, image: Tensor, label: Tensor) -> Tensor:
        one = Batch(image.unsqueeze(0), label.unsqueeze(0))
        state = ModelState(values, step.sent.buffers)
        plan = step.plan
        return batch_loss(
            step.model, state, one, batch_norm=plan.batch_norm, loss_scale=plan.loss_scale, changes=step.changes
        )[0]

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    chunk = max(1, _CHUNK_ELEMENTS // max(1, sum(p.numel() for p in parameters.values())))
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for images, labels in zip(*(torch.split(t, chunk) for t in (step.batch.inputs, step.batch.labels)), strict=True):
        gradients: Tensors = per_sample(parameters, images, labels)
        squares = sum(g.flatten(1).square().sum(1) for g in gradients.values())
        factors = (clip_norm / torch.as_tensor(squares).sqrt()).clamp(max=1.0)
        for name, g in gradients.items():
            total[name] += torch.tensordot(factors.to(g.dtype), g, dims=1)
    return total
