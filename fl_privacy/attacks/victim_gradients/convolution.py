"""The weight gradient of a convolution for each victim."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def weight_gradient(module: nn.Conv2d, inputs: Tensor, deltas: Tensor) -> Tensor:
    """(V, *weight shape) from the layer's inputs (V, B, C, H, W) and its outputs' gradient (V, B, O, h, w).

    On the CPU as one convolution with a group for each victim, which is as fast as the layer itself and needs no
    unfolded images; elsewhere as one product of unfolded images and output gradients.
    """
    padding = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(inputs.flatten(0, 1), module._reversed_padding_repeated_twice, mode=mode)
        inputs, padding = padded.reshape(*inputs.shape[:2], *padded.shape[1:]), (0, 0)
    settings = (module.stride, padding, module.dilation)
    if inputs.device.type == "cpu":
        grouped: Tensor = _GroupedWeightGradient.apply(inputs, deltas, module.weight.shape, (*settings, module.groups))
        return grouped.reshape(len(inputs), *module.weight.shape)
    columns = unfolded(module, inputs, settings)
    count, _, outputs = deltas.shape[:3]
    apart = deltas.reshape(*deltas.shape[:2], module.groups, outputs // module.groups, -1)
    gradient = torch.einsum("vbgot,vbgdt->vgod", apart, columns)
    return gradient.reshape(count, *module.weight.shape)


def unfolded(module: nn.Conv2d, inputs: Tensor, settings: tuple[Any, Any, Any]) -> Tensor:
    """(V, B, groups, D, T): the D inputs below each of the T output pixels."""
    stride, padding, dilation = settings
    columns = F.unfold(inputs.flatten(0, 1), module.kernel_size, dilation, padding, stride)
    return columns.reshape(*inputs.shape[:2], module.groups, -1, columns.shape[-1])


def _side_by_side(values: Tensor) -> Tensor:
    """(V, B, C, H, W) -> (B, V C, H, W)."""
    return values.transpose(0, 1).flatten(1, 2)


def _apart(values: Tensor, count: int) -> Tensor:
    """(B, V C, H, W) -> (V, B, C, H, W)."""
    return values.reshape(len(values), count, -1, *values.shape[2:]).transpose(0, 1)


class _GroupedWeightGradient(torch.autograd.Function):
    """The weight gradient, which is bilinear in inputs and output gradients, and its derivatives."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, deltas: Tensor, shape: torch.Size, settings: Any) -> Tensor:
        count = len(inputs)
        images, back = _side_by_side(inputs), _side_by_side(deltas)
        ctx.save_for_backward(images, back)
        *ctx.settings, groups = settings
        ctx.groups, ctx.count = groups * count, count
        weight = inputs.new_empty((count * shape[0], *shape[1:]))
        return _convolution_backward(ctx, back, images, weight, which=1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None, None]:
        images, back = ctx.saved_tensors
        weight = slopes[0].contiguous()
        by_images = _convolution_backward(ctx, back, images, weight, which=0)
        stride, padding, dilation = ctx.settings
        by_back = F.conv2d(images, weight, None, stride, padding, dilation, ctx.groups)
        return _apart(by_images, ctx.count), _apart(by_back, ctx.count), None, None


def _convolution_backward(ctx: Any, back: Tensor, images: Tensor, weight: Tensor, *, which: int) -> Tensor:
    wanted = [which == 0, which == 1, False]
    result = torch.ops.aten.convolution_backward(
        back, images, weight, None, *ctx.settings, False, [0, 0], ctx.groups, wanted
    )
    gradient: Tensor = result[which]
    return gradient
