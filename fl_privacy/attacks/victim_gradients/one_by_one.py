"""Gradients of the victims one after the other: for models that nothing else can handle."""

import torch
from torch import Tensor

from fl_privacy.attacks.victim_gradients.base import Setting, VictimGradients
from fl_privacy.gradients import loss_gradients
from fl_privacy.types import Batch, ModelState, Tensors


class OneByOne(VictimGradients):
    """A loop over the victims around :func:`fl_privacy.gradients.loss_gradients`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._state = ModelState(dict(setting.model.named_parameters()), dict(setting.model.named_buffers()))

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Gradients by name."""
        victims = [self._gradient(Batch(x, y)) for x, y in zip(inputs, labels, strict=True)]
        return {name: torch.stack([gradient[name] for gradient in victims]) for name in self._setting.names}

    def _gradient(self, batch: Batch) -> Tensors:
        plan = self._setting.plan
        return loss_gradients(
            self._setting.model,
            self._state,
            batch,
            batch_norm=plan.batch_norm,
            loss_scale=plan.loss_scale,
            create_graph=torch.is_grad_enabled(),
        ).gradients
