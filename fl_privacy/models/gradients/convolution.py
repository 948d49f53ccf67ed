"""Convolutions and norms with frozen parameters, and each victim's gradients with respect to these parameters."""

# A frozen norm after a convolution is folded into it: with mean m, precision 1/s, scale g and shift h for each channel,
# g (W x + b - m) / s + h is a convolution with the weight (g / s) W. If G is the gradient with respect to that weight,
# and d the sum of the outputs' gradients, the gradients with respect to W, b, h and g are (g / s) G, (g / s) d, d and
# ((G, W) + (b - m) d) / s.

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.types import Tensors


@dataclass
class Victims:
    """Number of victims (attacked batches) that are stacked in the current forward pass; the caller sets ``count``."""

    count: int = 1


class Affine(nn.Module):
    """Layer that scales and shifts a normalized activation, by channel or, if ``trailing``, by element."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, trailing: bool) -> None:
        super().__init__()
        self.weight, self.bias, self._trailing = weight, bias, trailing

    def forward(self, normalized: Tensor) -> Tensor:
        shape = self.weight.shape if self._trailing else (-1, *(1 for _ in normalized.shape[2:]))
        scaled = normalized * self.weight.view(shape)
        return scaled if self.bias is None else scaled + self.bias.view(shape)

    def gradients(self, inputs: Tensor, deltas: Tensor, names: Collection[str]) -> Tensors:
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
        flat = apart.transpose(0, 1).flatten(1, 2)
        one = flat[:, 0].numel() == 1  # which PyTorch refuses, and Keras normalizes to 0
        normalized = flat - flat if one else F.batch_norm(flat, None, None, training=True, eps=self._eps)
        return normalized.reshape(apart.transpose(0, 1).shape).transpose(0, 1).flatten(0, 1)


class FrozenNorm(nn.Module):
    """Batch normalization with fixed statistics, scale and shift."""

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
    """Return sums (V, C) of ``inputs * deltas`` and of ``deltas`` over images and positions, for each of V batches.

    ``inputs``, ``deltas`` (V, B, C, H, W): a layer's inputs, and the gradients with respect to its outputs.
    """
    products, total = _ChannelSums.apply(inputs, deltas)
    return products, total


class _ChannelSums(torch.autograd.Function):
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
    """Return a copy of ``model`` with each norm layer separated into a normalization and an :class:`Affine`.

    Also return a mapping of parameter names to those in the copy, and :class:`Victims`, whose ``count`` the caller sets
    before each pass.
    """
    # for statistics of each victim's batch, and without vmap's wrong second derivatives
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
    return _Separated(plain, Affine(weight, bias, trailing=isinstance(module, nn.LayerNorm)))


class _Separated(nn.Sequential):
    eps = property(lambda self: self[0].eps)
    weight = property(lambda self: self[1].weight)
    bias = property(lambda self: self[1].bias)


_NARROW, _MANY = 12, 16  # most input channels, and fewest images, for which ``transposed`` is faster
_FEW = 4  # most input channels of a victim for which matrix products are faster than a grouped convolution
_Pair = Sequence[int]
_compiles = ContextVar("compiles", default=False)


@contextmanager
def for_a_compiler() -> Iterator[None]:
    """Within the context, avoid operations that ``torch.compile`` handles badly."""
    token = _compiles.set(True)
    try:
        yield
    finally:
        _compiles.reset(token)


def better_by_phases(weight: Tensor, images: int, stride: _Pair, dilation: _Pair, groups: int) -> bool:
    """Return whether :func:`transposed` is faster than PyTorch's backward pass for this number of ``images``."""
    alike = 1 < stride[0] == stride[1] and tuple(dilation) == (1, 1) and groups == 1
    small = weight.shape[1] <= _NARROW and images >= _MANY and min(weight.shape[2:]) > 2 * stride[0]
    return alike and small and weight.device.type == "cpu"


def better_by_products(images: Tensor, weight: _Pair, stride: _Pair, dilation: _Pair) -> bool:
    """Return whether matrix products and ``F.fold`` are faster than a grouped convolution for V victims' gradients.

    ``images`` (1, V C, H, W): the victims' images, stacked as channels. ``weight``: shape of the stacked weights.
    """
    apart = stride[0] > 1 and tuple(dilation) == (1, 1) and images.shape[1] > weight[1] and not _compiles.get()
    return apart and len(images) == 1 and images.device.type == "cpu" and weight[1] <= _FEW


def transposed(back: Tensor, weight: Tensor, shape: Sequence[int], stride: int, padding: _Pair) -> Tensor:
    """Return the gradient (N, C, H, W) with respect to a convolution's input images, of the given ``shape``.

    ``back``: output gradients (N, O, h, w). ``weight``: (O, C, kh, kw).
    """
    # pixels with the same row and column modulo the stride (a phase) use the same part of the kernel: all phases are
    # outputs of one convolution without stride
    (outer, inner), counts = weight.shape[:2], [-(-size // stride) for size in shape[2:]]
    phases = []  # of rows and columns: first tap, number of taps and shift of each remainder
    for size, pad in zip(weight.shape[2:], padding, strict=True):
        firsts = [((place + pad) % stride, (place + pad) // stride) for place in range(stride)]
        phases.append([(first, len(range(first, size, stride)), shift) for first, shift in firsts])
    before = [max(0, *(taps - 1 - shift for _, taps, shift in own)) for own in phases]
    after = [max(shift for *_, shift in own) for own in phases]
    kernel = weight.new_zeros(inner, stride, stride, outer, *(b + a + 1 for b, a in zip(before, after, strict=True)))
    swapped = weight.transpose(0, 1)
    for row, (top, high, down) in enumerate(phases[0]):
        for column, (left, wide, right) in enumerate(phases[1]):
            rows = slice(before[0] + down + 1 - high, before[0] + down + 1)
            columns = slice(before[1] + right + 1 - wide, before[1] + right + 1)
            kernel[:, row, column, :, rows, columns] = swapped[..., top::stride, left::stride].flip(-1, -2)
    ends = [n - size + more for n, size, more in zip(counts, back.shape[2:], after, strict=True)]
    pads = [max(first, last) for first, last in zip(before, ends, strict=True)]
    found = F.conv2d(back, kernel.flatten(0, 2), padding=pads)
    tall, broad = (slice(p - b, p - b + n) for p, b, n in zip(pads, before, counts, strict=True))
    return F.pixel_shuffle(found[:, :, tall, broad], stride)[:, :, : shape[2], : shape[3]]


C = TypeVar("C", bound=nn.Conv2d)
_LITTLE = 1_000_000  # multiplications below which oneDNN's setup takes longer than the operation


class FrozenConv2d(nn.Conv2d):
    """Convolution with frozen weights, differentiable only with respect to its inputs."""

    def reset_parameters(self) -> None:
        """Skip the initialization, which takes longer than a convolution."""

    def forward(self, input: Tensor) -> Tensor:
        return self.convolved(input, self.weight, self.bias)

    def convolved(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return cast(Tensor, _Convolution.apply(images, weight, bias, settings))


def convolution_as(kind: type[C], module: nn.Conv2d) -> C:
    """Return a convolution of the class ``kind`` with settings and parameters of ``module``."""
    like: Any = module
    geometry = like.kernel_size, like.stride, like.padding, like.dilation, like.groups
    made = kind(module.in_channels, module.out_channels, *geometry, bias=False, device="meta")
    made.weight, made.bias = module.weight, module.bias
    return made


def pads_with_zeros(module: nn.Conv2d) -> bool:
    """Return whether ``module`` pads with zeros, and by numbers of pixels, not by a mode such as ``same``."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def convolution_gradients(
    module: nn.Conv2d, inputs: Tensor, deltas: Tensor, *, with_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return V victims' gradients with respect to weight, (V, *shape), and bias, (V, O), of the layer ``module``.

    ``inputs``: (V, B, C, H, W). ``deltas``: gradients (V, B, O, h, w) with respect to the O output channels.
    """
    padding = module.padding
    if not pads_with_zeros(module):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(inputs.flatten(0, 1), module._reversed_padding_repeated_twice, mode=mode)
        inputs, padding = padded.reshape(*inputs.shape[:2], *padded.shape[1:]), (0, 0)
    settings = (module.stride, padding, module.dilation)
    count, _, outputs = deltas.shape[:3]
    if inputs.device.type == "cpu":
        shape, groups = module.weight.shape, module.groups
        weight, bias = _GroupedGradients.apply(inputs, deltas, (shape, with_bias), (*settings, groups))
    else:
        columns = unfolded(module, inputs, settings)
        apart = deltas.reshape(*deltas.shape[:2], module.groups, outputs // module.groups, -1)
        weight, bias = torch.einsum("vbgot,vbgdt->vgod", apart, columns), deltas.sum((1, -2, -1)) if with_bias else None
    return weight.reshape(count, *module.weight.shape), None if bias is None else bias.reshape(count, outputs)


def unfolded(module: nn.Conv2d, inputs: Tensor, settings: tuple[Any, Any, Any]) -> Tensor:
    """Unfold victims' ``inputs`` (V, B, C, H, W) into the D values under the kernel at each of T output pixels.

    The result is (V, B, groups, D, T). ``settings``: stride, padding and dilation.
    """
    stride, padding, dilation = settings
    columns = F.unfold(inputs.flatten(0, 1), module.kernel_size, dilation, padding, stride)
    return columns.reshape(*inputs.shape[:2], module.groups, -1, columns.shape[-1])


def _side_by_side(values: Tensor) -> Tensor:
    return values.transpose(0, 1).flatten(1, 2)


def _apart(values: Tensor, count: int) -> Tensor:
    return values.reshape(len(values), count, -1, *values.shape[2:]).transpose(0, 1)


class _GroupedGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, deltas: Tensor, layer: tuple[torch.Size, bool], settings: Any
    ) -> tuple[Tensor, Tensor | None]:
        (shape, with_bias), count = layer, len(inputs)
        images, back = _side_by_side(inputs), _side_by_side(deltas)
        weight = inputs.new_empty((count * shape[0], *shape[1:]))
        ctx.save_for_backward(images, back)
        ctx.set_materialize_grads(False)
        *ctx.settings, groups = settings
        ctx.groups, ctx.count = groups * count, count
        found = _convolution_backward(ctx, back, images, weight, wanted=(False, True, with_bias))
        return found[1], found[2] if with_bias else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, Tensor, None, None]:
        images, back = ctx.saved_tensors
        by_weight, by_bias = slopes
        if by_weight is None:
            assert by_bias is not None
            return None, _apart(by_bias.reshape(1, -1, 1, 1).expand(back.shape), ctx.count), None, None
        weight = by_weight.contiguous()
        by_images = _by_images(ctx, back, images, weight)
        by_back = _convolution(images, weight, by_bias, (*ctx.settings, ctx.groups))
        return _apart(by_images, ctx.count), _apart(by_back, ctx.count), None, None


def _by_images(ctx: Any, back: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    stride, padding, dilation = ctx.settings
    if ctx.groups != ctx.count or not better_by_products(images, weight.shape, stride, dilation):
        return _convolution_backward(ctx, back, images, weight, wanted=(True, False, False))[0]
    kernels, deltas = weight.reshape(ctx.count, -1, weight[0].numel()), back.reshape(ctx.count, -1, back[0, 0].numel())
    size, kernel = images.shape[2:], weight.shape[2:]
    return F.fold(kernels.mT @ deltas, size, kernel, padding=padding, stride=stride).reshape(images.shape)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, settings: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.arguments = inputs.shape, settings
        return _convolution(inputs, weight, bias, settings)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        return _Transposed.apply(slopes[0], *ctx.saved_tensors, ctx.shape, ctx.arguments), None, None, None


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deltas: Tensor, weight: Tensor, shape: torch.Size, settings: Any) -> Tensor:
        ctx.save_for_backward(weight)
        *ctx.settings, ctx.groups = settings
        return _convolution_backward(ctx, deltas, deltas.new_empty(shape), weight, wanted=(True, False, False))[0]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _convolution(slopes[0], weight, None, (*ctx.settings, ctx.groups)), None, None, None


def _convolution(images: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, Any, Any, int]) -> Tensor:
    (down, right), (high, wide), dilation, groups = settings
    height, width = images.shape[2] + 2 * high - weight.shape[2], images.shape[3] + 2 * wide - weight.shape[3]
    positions = len(images) * (height // down + 1) * (width // right + 1)
    if groups != 1 or dilation != (1, 1) or not _is_little(images, weight, positions):
        return F.conv2d(images, weight, bias, *settings)
    return cast(Tensor, torch.ops.aten._slow_conv2d_forward(images, weight, weight.shape[2:], bias, *settings[:2]))


def _is_little(images: Tensor, weight: Tensor, positions: int) -> bool:
    return images.device.type == "cpu" and len(images) <= 2 and weight.numel() * positions <= _LITTLE


def _convolution_backward(
    ctx: Any, back: Tensor, images: Tensor, weight: Tensor, *, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, ...]:
    stride, padding, dilation = ctx.settings
    found: tuple[Tensor, ...]
    alone = wanted == (True, False, False)
    if alone and better_by_phases(weight, len(images), stride, dilation, ctx.groups):
        return (transposed(back, weight, images.shape, stride[0], padding),)
    if ctx.groups == 1 and dilation == (1, 1) and _is_little(images, weight, back[:, 0].numel()):
        size = weight.shape[2:]
        found = torch.ops.aten._slow_conv2d_backward.output_mask(back, images, weight, size, stride, padding, wanted)
    else:
        arguments = (stride, padding, dilation, False, [0, 0], ctx.groups, wanted)
        found = torch.ops.aten.convolution_backward(back, images, weight, [back.shape[1]], *arguments)
    return found


_POSITIONS = 0.7  # least ratio of a channel's outputs to its weights at which folding saves time


class FoldedConvolution(FrozenConv2d):
    """Convolution that includes the norm after it, with the parameters weight, bias, scale and shift."""

    scale: nn.Parameter | None
    shift: nn.Parameter | None

    @classmethod
    def of_both(cls, convolution: nn.Conv2d, norm: FrozenNorm) -> Self:
        folded = convolution_as(cls, convolution)
        folded.scale, folded.shift = norm.weight, norm.bias
        folded._set(norm)
        return folded

    def _set(self, norm: FrozenNorm) -> None:
        self._precision = norm.slope
        self._centered = norm.offset if self.bias is None else norm.offset + norm.slope * self.bias
        self._slope = self._precision if self.scale is None else self._precision * self.scale
        offset = self._centered if self.scale is None else self._centered * self.scale
        self._folded_bias = offset if self.shift is None else offset + self.shift
        self._folded_weight = self._slope.view(-1, 1, 1, 1) * self.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.convolved(input, self._folded_weight, self._folded_bias)

    def gradients(self, inputs: Tensor, deltas: Tensor, names: Collection[str]) -> Tensors:
        by_weight, total = convolution_gradients(self, inputs, deltas, with_bias=True)
        assert total is not None
        found = {}
        if "weight" in names:
            found["weight"] = by_weight * self._slope.view(-1, 1, 1, 1)
        if "bias" in names:
            found["bias"] = total * self._slope
        if "scale" in names:
            found["scale"] = self._precision * (by_weight * self.weight).flatten(2).sum(2) + self._centered * total
        return {**found, "shift": total} if "shift" in names else found


@torch.no_grad()
def foldable(model: nn.Module, inputs: Tensor) -> list[tuple[str, str]]:
    """Return the names of (convolution, norm) pairs that are faster if folded into one layer, for inputs (N, ...).

    Folding is wrong if anything else uses the convolution's output, which is not detected.
    """
    modules = {name: m for name, m in model.named_modules() if type(m) in (FrozenConv2d, FrozenNorm)}
    with leaving(modules) as calls:
        model(inputs)
    found, times = [], Counter(id(call.module) for call in calls)
    for one, other in pairwise(calls):
        follows = type(one.module) is FrozenConv2d and type(other.module) is FrozenNorm and other.inputs is one.output
        if follows and times[id(one.module)] == times[id(other.module)] == 1:
            weight: Tensor = one.module.weight  # type: ignore[assignment]
            if one.output[0, 0].numel() >= _POSITIONS * weight[0].numel():
                found.append((one.name, other.name))
    return found


def fold(model: nn.Module, pairs: Sequence[tuple[str, str]]) -> None:
    """Replace each (convolution, norm) pair of layers, found by :func:`foldable`, by a :class:`FoldedConvolution`."""
    for name, behind in pairs:
        convolution, norm = model.get_submodule(name), model.get_submodule(behind)
        assert isinstance(convolution, FrozenConv2d) and isinstance(norm, FrozenNorm)
        model.set_submodule(name, FoldedConvolution.of_both(convolution, norm))
        model.set_submodule(behind, nn.Identity())
