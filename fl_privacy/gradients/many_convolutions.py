"""Convolutions of many models at once, model by model where each of them fills the machine.

``torch.func`` makes a grouped convolution of them, whatever their size. Its kernels reach a fifth of the rate of one
model's own where a batch is large, and beat it where starting an operation takes the time.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.gradients.convolution import convolution_as, pads_with_zeros
from fl_privacy.gradients.watch import leaving

_FILLS = 1_500_000
"""Multiplications of one model's convolution from which it is computed by itself."""

_Geometry = tuple[Any, Any, Any, int]
"""Stride, padding, dilation and groups."""


class ConvolutionOfMany(nn.Conv2d):
    """A convolution that ``vmap`` over models computes for one model after the other."""

    def reset_parameters(self) -> None:
        """Values are given."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, O, h, w)."""
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        output: Tensor = _Convolution.apply(input, self.weight, geometry)
        return output if self.bias is None else output + self.bias[:, None, None]


def for_many(model: nn.Module, inputs: Tensor) -> nn.Module:
    """A copy of ``model`` for ``vmap`` over its values, on batches as large as ``inputs`` (B, C, H, W).

    Its convolutions that fill the machine are :class:`ConvolutionOfMany`.
    """
    copied = copy.deepcopy(model)
    found = {n: m for n, m in copied.named_modules() if n and type(m) is nn.Conv2d and pads_with_zeros(m)}
    with torch.no_grad(), leaving(found, _output) as calls:
        copied(inputs)
    large = {call.name for call in calls if _fills(call.inputs, found[call.name].weight, call.output[0, 0].numel())}
    for name in large:
        parent, _, own = name.rpartition(".")
        setattr(copied.get_submodule(parent), own, convolution_as(ConvolutionOfMany, found[name]))
    return copied


def _output(module: nn.Module, given: Any, output: Any) -> Tensor:
    found: Tensor = output
    return found


class _Convolution(torch.autograd.Function):
    """(inputs, weight) -> outputs."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
        return F.conv2d(inputs, weight, None, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, _Geometry], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.geometry = inputs[2]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        wanted = tuple(ctx.needs_input_grad[:2])
        by_inputs, by_weight = _Slopes.apply(slopes[0], *ctx.saved_tensors, (wanted, ctx.geometry))
        return by_inputs if wanted[0] else None, by_weight if wanted[1] else None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], inputs: Tensor, weight: Tensor, geometry: _Geometry
    ) -> tuple[Tensor, int]:
        inputs, weight = (_first(info, *pair) for pair in zip((inputs, weight), in_dims, strict=False))
        return torch.stack([F.conv2d(*pair, None, *geometry) for pair in zip(inputs, weight, strict=True)]), 0


class _Slopes(torch.autograd.Function):
    """(output gradients, inputs, weight) -> gradients of inputs and weight; of nothing where they are not wanted."""

    @staticmethod
    def forward(deltas: Tensor, inputs: Tensor, weight: Tensor, how: Any) -> tuple[Tensor, Tensor]:
        return _backward((deltas, inputs, weight), how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """It is not differentiated again."""

    @staticmethod
    def vmap(  # noqa: PLR0917
        info: Any, in_dims: tuple[int | None, ...], deltas: Tensor, inputs: Tensor, weight: Tensor, how: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        pairs = zip((deltas, inputs, weight), in_dims, strict=False)
        parts = zip(*(_first(info, *pair) for pair in pairs), strict=True)
        by_inputs, by_weight = zip(*(_backward(part, how) for part in parts), strict=True)
        return (torch.stack(by_inputs), torch.stack(by_weight)), (0, 0)


def _backward(part: Sequence[Tensor], how: Any) -> tuple[Tensor, Tensor]:
    (wanted, (*settings, groups)), nothing = how, part[0].new_empty(0)
    found = torch.ops.aten.convolution_backward(*part, None, *settings, False, (0, 0), groups, (*wanted, False))
    return found[0] if wanted[0] else nothing, found[1] if wanted[1] else nothing


def _first(info: Any, values: Tensor, place: int | None) -> Tensor:
    """With the models in front."""
    return values.expand(info.batch_size, *values.shape) if place is None else values.movedim(place, 0)


def _fills(inputs: Tensor, weight: Tensor, outputs: int) -> bool:
    """Whether a convolution of inputs (B, C, H, W) to ``outputs`` pixels each is large."""
    return len(inputs) * outputs * weight.numel() >= _FILLS
