"""The gradient of one layer's parameters for each victim, from what entered it and what came back."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fl_privacy.attacks.victim_gradients.convolution import FrozenConv2d, pads_with_zeros, unfolded, weight_gradient
from fl_privacy.attacks.victim_gradients.normalization import Affine, FrozenNorm
from fl_privacy.types import Tensors


@dataclass(frozen=True, eq=False)
class Call:
    """Of a layer: inputs (V, B, ...) and the gradient of the victims' losses by its outputs (V, B, ...)."""

    inputs: Tensor
    deltas: Tensor


def parameter_gradients(module: nn.Module, call: Call, names: Collection[str]) -> Tensors:
    """Gradient (V, *shape) of the parameters ``names`` of ``module``."""
    if _is_convolution(module):
        return _select(names, lambda: weight_gradient(module, call.inputs, call.deltas), call.deltas.sum((1, -2, -1)))
    if type(module) is nn.Linear:
        deltas, inputs = call.deltas.flatten(1, -2), call.inputs.flatten(1, -2)
        return _select(names, lambda: deltas.mT @ inputs, deltas.sum(1))
    if isinstance(module, (Affine, FrozenNorm)):
        return module.gradients(call.inputs, call.deltas, names)
    return _any_layer(module, call, names)


def _is_convolution(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    return type(module) in (nn.Conv2d, FrozenConv2d)


def has_weight_factors(module: nn.Module) -> bool:
    """Whether :func:`weight_factors` can be asked for."""
    if _is_convolution(module):
        return module.groups == 1 and pads_with_zeros(module)
    return type(module) is nn.Linear


def weight_factors(module: nn.Module, call: Call) -> tuple[Tensor, Tensor]:
    """``deltas`` (V, O, P) and ``inputs`` (V, D, P) whose product over the positions is the weight's gradient."""
    if isinstance(module, nn.Conv2d):
        columns = unfolded(module, call.inputs, (module.stride, module.padding, module.dilation))[:, :, 0]
        return _merge_images(call.deltas.flatten(-2)), _merge_images(columns)
    return call.deltas.flatten(1, -2).mT, call.inputs.flatten(1, -2).mT


def _merge_images(values: Tensor) -> Tensor:
    """(V, B, N, T) -> (V, N, B T)."""
    return values.squeeze(1) if values.shape[1] == 1 else values.transpose(1, 2).flatten(2)


def _select(names: Collection[str], weight: Callable[[], Tensor], bias: Tensor) -> Tensors:
    gradients = {"weight": weight()} if "weight" in names else {}
    return {**gradients, "bias": bias} if "bias" in names else gradients


def _any_layer(module: nn.Module, call: Call, names: Collection[str]) -> Tensors:
    parameters = {name: p for name, p in module.named_parameters() if name in names}

    def pull_back(inputs: Tensor, delta: Tensor) -> Tensors:
        back = vjp(lambda values: functional_call(module, values, (inputs,)), parameters)[1]
        gradients: Tensors = back(delta)[0]
        return gradients

    result: Tensors = vmap(pull_back)(call.inputs, call.deltas)
    return result
