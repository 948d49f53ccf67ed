"""Gradients of the victims by ``torch.func.vmap``: for any model without side effects."""

import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fl_privacy.attacks.victim_gradients.base import Setting, VictimGradients
from fl_privacy.attacks.victim_gradients.normalization import separated_copy
from fl_privacy.types import Tensors


class VictimLoss:
    """The loss of one victim's batch as a function of parameters, under their original names."""

    def __init__(self, setting: Setting) -> None:
        self._separated = separated_copy(setting.model)
        self._scale = setting.plan.loss_scale

    def parameters(self) -> dict[str, Tensor]:
        """As sent."""
        values = dict(self._separated.model.named_parameters())
        return {name: values[own] for name, own in self._separated.names.items()}

    def __call__(self, parameters: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
        """Scalar; parameters that are missing are as sent."""
        renamed = {self._separated.names[name]: value for name, value in parameters.items()}
        logits = functional_call(self._separated.model, renamed, (inputs,))
        return self._scale * F.cross_entropy(logits, labels)


class Vectorized(VictimGradients):
    """``vmap`` of the gradient of one victim's loss."""

    def __init__(self, setting: Setting) -> None:
        self._loss = VictimLoss(setting)
        parameters = self._loss.parameters()
        self._parameters = {name: parameters[name] for name in setting.names}

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Gradients by name."""
        gradients: Tensors = vmap(grad(self._loss), in_dims=(None, 0, 0))(self._parameters, inputs, labels)
        return gradients
