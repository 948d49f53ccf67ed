"""Gradients of the victims by ``torch.func.vmap``: for any model without side effects."""

import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fl_privacy.attacks.victim_gradients.base import Setting
from fl_privacy.types import Tensors


class Vectorized:
    """``vmap`` of the gradient of one victim's loss."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        parameters = dict(setting.model.named_parameters())
        self._parameters = {name: parameters[name] for name in setting.names}

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Gradients by name."""
        gradients: Tensors = vmap(grad(self._loss), in_dims=(None, 0, 0))(self._parameters, inputs, labels)
        return gradients

    def _loss(self, parameters: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(self._setting.model, dict(parameters), (inputs,))
        return self._setting.plan.loss_scale * F.cross_entropy(logits, labels)
