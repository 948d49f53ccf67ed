"""Convolutions with frozen weights, and the gradient that each victim would have of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LITTLE = 1_000_000
"""Multiplications below which an operation is over before oneDNN has chosen how to do it."""


class FrozenConv2d(nn.Conv2d):
    """A convolution that is differentiated by its inputs alone.

    PyTorch's own, differentiated twice, also computes what nobody asked for: the mixed derivative by the weight.
    """

    @classmethod
    def of(cls, module: nn.Conv2d) -> "FrozenConv2d":
        """With the parameters of ``module``, which pads with zeros by numbers."""
        frozen = cls(
            module.in_channels,
            module.out_channels,
            module.kernel_size,  # type: ignore[arg-type]
            stride=module.stride,  # type: ignore[arg-type]
            padding=module.padding,  # type: ignore[arg-type]
            dilation=module.dilation,  # type: ignore[arg-type]
            groups=module.groups,
            bias=False,
            device="meta",
        )
        frozen.weight, frozen.bias = module.weight, module.bias
        return frozen

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, O, h, w)."""
        settings = (self.stride, self.padding, self.dilation, self.groups)
        output: Tensor = _Convolution.apply(input, self.weight, self.bias, settings)
        return output


def freeze_convolutions(model: nn.Module) -> None:
    """Put a :class:`FrozenConv2d` in the place of each convolution within ``model``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and pads_with_zeros(child):
                setattr(parent, name, FrozenConv2d.of(child))


def pads_with_zeros(module: nn.Conv2d) -> bool:
    """By numbers, as the operations below take them."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def weight_gradient(module: nn.Conv2d, inputs: Tensor, deltas: Tensor) -> Tensor:
    """(V, *weight shape) from the layer's inputs (V, B, C, H, W) and its outputs' gradient (V, B, O, h, w).

    On the CPU as one convolution with a group for each victim, which is as fast as the layer itself and needs no
    unfolded images; elsewhere as one product of unfolded images and output gradients.
    """
    padding = module.padding
    if not pads_with_zeros(module):
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
        by_back = _convolution(images, weight, None, (*ctx.settings, ctx.groups))
        return _apart(by_images, ctx.count), _apart(by_back, ctx.count), None, None


class _Convolution(torch.autograd.Function):
    """Linear in the inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, settings: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.arguments = inputs.shape, settings
        return _convolution(inputs, weight, bias, settings)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        return _Transposed.apply(slopes[0], *ctx.saved_tensors, ctx.shape, ctx.arguments), None, None, None


class _Transposed(torch.autograd.Function):
    """The transpose of a convolution."""

    @staticmethod
    def forward(ctx: Any, deltas: Tensor, weight: Tensor, shape: torch.Size, settings: Any) -> Tensor:
        ctx.save_for_backward(weight)
        *ctx.settings, ctx.groups = settings
        return _convolution_backward(ctx, deltas, deltas.new_empty(shape), weight, which=0)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _convolution(slopes[0], weight, None, (*ctx.settings, ctx.groups)), None, None, None


def _convolution(images: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, Any, Any, int]) -> Tensor:
    """``F.conv2d`` with ``settings``: stride, padding, dilation and groups."""
    (down, right), (high, wide), dilation, groups = settings
    height, width = images.shape[2] + 2 * high - weight.shape[2], images.shape[3] + 2 * wide - weight.shape[3]
    positions = len(images) * (height // down + 1) * (width // right + 1)
    if groups != 1 or dilation != (1, 1) or not _is_little(images, weight, positions):
        return F.conv2d(images, weight, bias, *settings)
    found: Tensor = torch.ops.aten._slow_conv2d_forward(images, weight, weight.shape[2:], bias, *settings[:2])
    return found


def _is_little(images: Tensor, weight: Tensor, positions: int) -> bool:
    """Whether PyTorch's own loops over images are faster: they start at once."""
    return images.device.type == "cpu" and len(images) <= 2 and weight.numel() * positions <= _LITTLE


def _convolution_backward(ctx: Any, back: Tensor, images: Tensor, weight: Tensor, *, which: int) -> Tensor:
    wanted = [which == 0, which == 1, False]
    stride, padding, dilation = ctx.settings
    if ctx.groups == 1 and dilation == (1, 1) and _is_little(images, weight, back[:, 0].numel()):
        found: tuple[Tensor, ...] = torch.ops.aten._slow_conv2d_backward.output_mask(
            back, images, weight, weight.shape[2:], stride, padding, wanted
        )
        return found[which]
    result = torch.ops.aten.convolution_backward(
        back, images, weight, None, stride, padding, dilation, False, [0, 0], ctx.groups, wanted
    )
    gradient: Tensor = result[which]
    return gradient
