"""Gradients of many victims at once: one model, an update for each victim."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fl_privacy.gradients.batch import loss_gradients
from fl_privacy.gradients.normalization import separated_copy
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors


@dataclass(frozen=True, eq=False)
class Setting:
    """What all victims of a group share.

    Attributes:
        model: frozen, in the mode of the plan, with the values sent.
        names: the tensors that were uploaded and are to be matched.
        plan: of the clients.
        hidden: weight of the linear layer into whose input a loss that nobody else knows sends gradients.
    """

    model: nn.Module
    names: Sequence[str]
    plan: LocalPlan
    hidden: str | None = None


class VictimGradients(ABC):
    """(inputs (V, B, C, H, W), labels (V, B) or (V, B, K)) -> gradient (V, *shape) of each tensor.

    It can be differentiated by the inputs and by soft labels.
    """

    @abstractmethod
    def __init__(self, setting: Setting) -> None: ...

    @abstractmethod
    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
        """Gradients by name."""

    def under(self, setting: Setting) -> Self:
        """The same way of computing, for the same model in another setting."""
        return type(self)(setting)


class VictimLoss:
    """The loss of one victim's batch as a function of parameters, under their original names."""

    def __init__(self, setting: Setting) -> None:
        self._separated = separated_copy(setting.model)
        self._scale = setting.plan.loss_scale

    def parameters(self) -> dict[str, Tensor]:
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
        gradients: Tensors = vmap(grad(self._loss), in_dims=(None, 0, 0))(self._parameters, inputs, labels)
        return gradients


class OneByOne(VictimGradients):
    """A loop over the victims around :func:`fl_privacy.gradients.loss_gradients`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._state = ModelState(dict(setting.model.named_parameters()), dict(setting.model.named_buffers()))

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensors:
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
