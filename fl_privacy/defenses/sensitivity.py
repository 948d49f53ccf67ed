"""How much each layer's gradient changes with the input."""

import torch
from torch import Tensor
from torch.func import grad, jvp

from fl_privacy.defenses.base import LocalStep
from fl_privacy.gradients import batch_loss
from fl_privacy.progress import counted
from fl_privacy.types import Batch, ModelState, Tensors


def gradient_sensitivity(step: LocalStep, *, directions: int, rng: torch.Generator) -> dict[str, float]:
    """Frobenius norm of d (gradient of a parameter) / d (inputs), by parameter name.

    Estimated by ``directions`` products of forward over reverse mode with independent random signs v:
    E||J v||^2 = ||J||_F^2. Batch-norm layers are in evaluation mode.
    """
    parameters = {name: p.detach() for name, p in step.sent.parameters.items()}

    def loss(values: Tensors, inputs: Tensor) -> Tensor:
        state = ModelState(values, step.sent.buffers)
        batch = Batch(inputs, step.batch.labels)
        return batch_loss(
            step.model, state, batch, batch_norm="eval", loss_scale=step.plan.loss_scale, changes=step.changes
        )[0]

    def gradient(inputs: Tensor) -> Tensors:
        result: Tensors = grad(loss)(parameters, inputs)
        return result

    x = step.batch.inputs
    squares = dict.fromkeys(parameters, 0.0)
    for _ in counted("sensitivity of layers", range(directions)):
        signs = torch.randint(0, 2, x.shape, generator=rng, device=rng.device).to(x) * 2 - 1
        changes: Tensors = jvp(gradient, (x,), (signs,))[1]
        for name, change in changes.items():
            squares[name] += float(change.square().sum()) / directions
    return {name: square**0.5 for name, square in squares.items()}
