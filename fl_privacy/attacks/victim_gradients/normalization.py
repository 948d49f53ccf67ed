"""Norm layers in two parts: what normalizes, and the scale and shift that are learned."""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.types import Tensors


@dataclass
class Victims:
    """How many victims the images of the pass under way belong to."""

    count: int = 1


class Affine(nn.Module):
    """Scale and shift of a normalized activation, channel by channel or, ``trailing``, element by element."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, trailing: bool) -> None:
        super().__init__()
        self.weight, self.bias, self._trailing = weight, bias, trailing

    def forward(self, normalized: Tensor) -> Tensor:
        """Of the shape of the input."""
        if self._trailing:
            scaled = normalized * self.weight
            return scaled if self.bias is None else scaled + self.bias
        shape = (-1, *(1 for _ in normalized.shape[2:]))
        scaled = normalized * self.weight.view(shape)
        return scaled if self.bias is None else scaled + self.bias.view(shape)

    def gradients(self, inputs: Tensor, deltas: Tensor, names: Collection[str]) -> Tensors:
        """Gradients (V, *shape) of the parameters ``names`` from (V, B, ...)."""
        dims = deltas.dim()
        kept = set(range(dims - self.weight.dim(), dims)) if self._trailing else {2}
        summed = [dim for dim in range(1, dims) if dim not in kept]
        gradients = {}
        if "weight" in names:
            gradients["weight"] = (deltas * inputs).sum(summed)
        if "bias" in names:
            gradients["bias"] = deltas.sum(summed)
        return gradients


class _VictimBatchNorm(nn.Module):
    """Batch normalization by the statistics of each victim's own images."""

    def __init__(self, eps: float, victims: Victims) -> None:
        super().__init__()
        self._eps, self._victims = eps, victims

    def forward(self, inputs: Tensor) -> Tensor:
        """(V B, C, ...) -> the same shape."""
        count = self._victims.count
        apart = inputs.reshape(count, -1, *inputs.shape[1:])
        side_by_side = apart.transpose(0, 1).flatten(1, 2)
        normalized = F.batch_norm(side_by_side, None, None, training=True, eps=self._eps)
        return normalized.reshape(apart.transpose(0, 1).shape).transpose(0, 1).flatten(0, 1)


class _Standardize(nn.Module):
    """Batch normalization by given statistics."""

    def __init__(self, mean: Tensor, variance: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("scale", (variance + eps).rsqrt())
        self.register_buffer("shift", -mean * (variance + eps).rsqrt())

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, C, ...) -> the same shape."""
        shape = (-1, *(1 for _ in inputs.shape[2:]))
        return torch.addcmul(self.shift.view(shape), inputs, self.scale.view(shape))  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class Separated:
    """A model whose norm layers are a normalization and an :class:`Affine`.

    Attributes:
        model: the copy.
        names: of the original parameter -> of the same parameter in ``model``.
        victims: to be told how many there are before each pass.
    """

    model: nn.Module
    names: dict[str, str]
    victims: Victims


def separated_copy(model: nn.Module) -> Separated:
    """A copy of ``model`` that computes the same.

    Besides making each victim's statistics and gradients accessible this keeps clear of ``vmap`` of a fused norm layer,
    whose weight gradient has a wrong derivative by the inputs.
    """
    copied, victims = copy.deepcopy(model), Victims()
    original = {id(p): name for name, p in copied.named_parameters()}
    for name, module in list(copied.named_modules()):
        replacement = _separated(module, victims)
        if replacement is not None and name:
            parent, _, attribute = name.rpartition(".")
            setattr(copied.get_submodule(parent), attribute, replacement)
    return Separated(copied, {original[id(p)]: name for name, p in copied.named_parameters()}, victims)


def _separated(module: nn.Module, victims: Victims) -> nn.Module | None:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module.running_mean is None or module.running_var is None:
            plain: nn.Module = _VictimBatchNorm(module.eps, victims)
        else:
            plain = _Standardize(module.running_mean, module.running_var, module.eps)
    elif isinstance(module, nn.GroupNorm):
        plain = nn.GroupNorm(module.num_groups, module.num_channels, module.eps, affine=False)
    elif isinstance(module, nn.LayerNorm):
        plain = nn.LayerNorm(module.normalized_shape, module.eps, elementwise_affine=False)
    else:
        return None
    weight: Any = module.weight
    if weight is None:
        return plain
    bias: Any = module.bias
    return nn.Sequential(plain, Affine(weight, bias, trailing=isinstance(module, nn.LayerNorm)))
