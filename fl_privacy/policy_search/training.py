"""The semi-trained model behind the privacy score."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.gradients import loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, ModelState

TrainingProgress = Callable[[int, int, float], None]
"""(epochs done, epochs in all, mean loss of the last)."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """SGD with momentum and three steps down; the defaults are the paper's.

    Attributes:
        epochs: passes over the examples.
        lr: at first; a tenth of it after 3/8, 5/8 and 7/8 of the epochs.
        batch_size: examples a step.
        momentum: in [0, 1).
        weight_decay: l2 penalty.
    """

    epochs: int = 50
    lr: float = 0.1
    batch_size: int = 128
    momentum: float = 0.9
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            checks.whole(f"training.{name}", getattr(self, name), at_least=1, example=50)
        checks.number("training.lr", self.lr, above=0, example=0.1)
        checks.number("training.momentum", self.momentum, at_least=0, below=1, example=0.9)
        checks.number("training.weight_decay", self.weight_decay, at_least=0, example=5e-4)


def train_model(
    model: nn.Module,
    batch: Batch,
    plan: TrainingPlan,
    *,
    seed: int,
    progress: TrainingProgress = lambda done, total, loss: None,
) -> ModelState:
    """The values of ``model`` after training on ``batch``, from those it has; the model is left as it was.

    Args:
        model: on the device of ``batch``.
        batch: all examples, (N, C, H, W) in [0, 1].
        plan: how.
        seed: of the order of the examples.
        progress: told after each epoch.

    Raises:
        UserError: the loss is no longer finite.
    """
    state, order = ModelState.of(model), derive_generator(seed, "training", "order")
    parameters = {name: p.clone().requires_grad_() for name, p in state.parameters.items()}
    buffers = state.buffers
    optimizer = torch.optim.SGD(
        list(parameters.values()), lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
    )
    steps_down = [round(plan.epochs * share) for share in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, steps_down, gamma=0.1)
    for epoch in range(plan.epochs):
        losses = []
        for chosen in torch.split(torch.randperm(len(batch), generator=order).to(batch.labels.device), plan.batch_size):
            result = loss_gradients(
                model, ModelState(parameters, buffers), Batch(batch.inputs[chosen], batch.labels[chosen])
            )
            for name, parameter in parameters.items():
                parameter.grad = result.gradients[name]
            optimizer.step()
            buffers = result.buffers
            losses.append(result.loss)
        schedule.step()
        mean = float(torch.stack(losses).mean())
        if not math.isfinite(mean):
            raise UserError(
                f"The model that policies are scored on is expected to learn, but its loss is {mean} in epoch"
                f" {epoch + 1}; lower training.lr, which is {plan.lr}."
            )
        progress(epoch + 1, plan.epochs, mean)
    return ModelState({name: p.detach() for name, p in parameters.items()}, buffers)
