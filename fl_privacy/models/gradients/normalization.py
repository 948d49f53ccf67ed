"""Norm layers in two parts: normalization, and learned scale and shift."""

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
    """Number of victims in the current pass."""

    count: int = 1


class Affine(nn.Module):
    """Scale and shift of a normalized activation, channel by channel or, ``trailing``, element by element."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, trailing: bool) -> None:
        super().__init__()
        self.weight, self.bias, self._trailing = weight, bias, trailing

    def forward(self, normalized: Tensor) -> Tensor:
        shape = self.weight.shape if self._trailing else (-1, *(1 for _ in normalized.shape[2:]))
        scaled = normalized * self.weight.view(shape)
        return scaled if self.bias is None else scaled + self.bias.view(shape)

    def gradients(self, inputs: Tensor, deltas: Tensor, names: Collection[str]) -> Tensors:
        """Compute gradients (V, *shape) of the parameters ``names`` from (V, B, ...)."""
        if not self._trailing:
            weight, bias = channel_sums(inputs, deltas)
        else:
            summed = list(range(1, deltas.dim() - self.weight.dim()))
            weight, bias = (deltas * inputs).sum(summed), deltas.sum(summed)
        return {name: value for name, value in (("weight", weight), ("bias", bias)) if name in names}


class _VictimBatchNorm(nn.Module):
    def __init__(self, eps: float, victims: Victims) -> None:
        super().__init__()
        self._eps, self._victims = eps, victims

    def forward(self, inputs: Tensor) -> Tensor:
        apart = inputs.reshape(self._victims.count, -1, *inputs.shape[1:])
        normalized = F.batch_norm(apart.transpose(0, 1).flatten(1, 2), None, None, training=True, eps=self._eps)
        return normalized.reshape(apart.transpose(0, 1).shape).transpose(0, 1).flatten(0, 1)


class FrozenNorm(nn.Module):
    """Batch normalization by given statistics, ``slope`` and ``offset`` (C,), with scale and shift, in one pass."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.slope = (variance + norm.eps).rsqrt()
        self.offset = -mean * self.slope

    def forward(self, inputs: Tensor) -> Tensor:
        shape = (-1, *(1 for _ in inputs.shape[2:]))
        slope, offset = self.slope, self.offset
        if self.weight is not None:
            slope, offset = slope * self.weight, offset * self.weight
        if self.bias is not None:
            offset = offset + self.bias
        return (inputs * slope.view(shape)).add_(offset.view(shape))  # addcmul is slow with broadcasting

    def gradients(self, inputs: Tensor, deltas: Tensor, names: Collection[str]) -> Tensors:
        products, total = channel_sums(inputs, deltas)
        weight = self.slope * products + self.offset * total
        return {name: value for name, value in (("weight", weight), ("bias", total)) if name in names}


def channel_sums(inputs: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the products of (V, B, C, ...), and ``deltas`` alone, over images and positions, (V, C) each."""
    products, total = _ChannelSums.apply(inputs, deltas)
    return products, total


class _ChannelSums(torch.autograd.Function):
    """Sums in one pass on the CPU, without forming the products."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(inputs, deltas)
        if inputs.device.type != "cpu":
            dims = [1, *range(3, inputs.dim())]
            return (inputs * deltas).sum(dims), deltas.sum(dims)
        rows = inputs.shape[:3].numel()
        flat = inputs.reshape(1, rows, -1), deltas.reshape(1, rows, -1)
        zeros, ones = inputs.new_zeros(rows), inputs.new_ones(rows)
        found = torch.ops.aten.native_batch_norm_backward(
            flat[1], flat[0], None, zeros, ones, None, None, False, 0.0, [False, True, True]
        )
        products, total = (values.reshape(inputs.shape[:3]).sum(1) for values in found[1:])
        return products, total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        inputs, deltas = ctx.saved_tensors
        by_products, by_total = (slope.reshape(len(slope), 1, -1, *(1 for _ in inputs.shape[3:])) for slope in slopes)
        return deltas * by_products, (inputs * by_products).add_(by_total)


def separated_copy(model: nn.Module) -> tuple[nn.Module, dict[str, str], Victims]:
    """Copy ``model`` with each norm layer as a normalization and an :class:`Affine`.

    This gives access to each victim's statistics and gradients, and avoids ``vmap`` of a fused norm layer, whose weight
    gradient has a wrong derivative by the inputs. Return also each parameter's name in ``model`` -> that in the copy,
    and the number of victims, to be set before each pass.
    """
    copied, victims = copy.deepcopy(model), Victims()
    original = {id(p): name for name, p in copied.named_parameters()}
    for name, module in list(copied.named_modules()):
        replacement = _separated(module, victims)
        if replacement is not None and name:
            parent, _, attribute = name.rpartition(".")
            setattr(copied.get_submodule(parent), attribute, replacement)
    return copied, {original[id(p)]: name for name, p in copied.named_parameters()}, victims


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
