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
            product = channel_products(inputs, deltas) if not self._trailing else (deltas * inputs).sum(summed)
            gradients["weight"] = product
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


class FrozenNorm(nn.Module):
    """Batch normalization by given statistics with its scale and shift, in one pass over the activation."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self._slope = (variance + norm.eps).rsqrt()
        self._offset = -mean * self._slope

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, C, ...) -> the same shape."""
        shape = (-1, *(1 for _ in inputs.shape[2:]))
        slope, offset = self._slope, self._offset
        if self.weight is not None:
            slope, offset = slope * self.weight, offset * self.weight
        if self.bias is not None:
            offset = offset + self.bias
        return torch.addcmul(offset.view(shape), inputs, slope.view(shape))

    def gradients(self, inputs: Tensor, deltas: Tensor, names: Collection[str]) -> Tensors:
        """Gradients (V, C) of the parameters ``names``."""
        total = deltas.transpose(1, 2).flatten(2).sum(2)
        gradients = {}
        if "weight" in names:
            gradients["weight"] = self._slope * channel_products(inputs, deltas) + self._offset * total
        return {**gradients, "bias": total} if "bias" in names else gradients


def channel_products(one: Tensor, other: Tensor) -> Tensor:
    """Sum over images and positions of the products of (V, B, C, ...): (V, C), without forming the products."""
    rows = [values.transpose(1, 2).flatten(2).flatten(0, 1) for values in (one, other)]
    return torch.bmm(rows[0][:, None], rows[1][..., None]).reshape(len(one), -1)


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
        if module.running_mean is not None and module.running_var is not None:
            return FrozenNorm(module, module.running_mean, module.running_var)
        plain: nn.Module = _VictimBatchNorm(module.eps, victims)
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
