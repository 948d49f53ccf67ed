"""Rules for each victim's parameter gradients by layer type; types without a rule use the slower ``torch.func``."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fl_privacy.models.gradients.convolution import (
    FoldedConvolution,
    FrozenConv2d,
    convolution_gradients,
    pads_with_zeros,
    unfolded,
)
from fl_privacy.models.gradients.normalization import Affine, FrozenNorm
from fl_privacy.types import Tensors


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer during the pass over all victims.

    ``names``: layer's name of each wanted parameter -> the model's. ``inputs`` are (V, B, ...), ``deltas`` (V, B, ...)
    the gradient of the victims' losses by the outputs.
    """

    module: nn.Module
    names: Mapping[str, str]
    inputs: Tensor
    deltas: Tensor

    @property
    def positions(self) -> int:
        """Return P, the number of positions at which the layer is applied to a victim's images."""
        outputs = self.deltas.shape[2] if isinstance(self.module, nn.Conv2d) else self.deltas.shape[-1]
        return self.deltas[0].numel() // outputs

    def rows(self, chosen: slice) -> "LayerCall":
        return replace(self, inputs=self.inputs[chosen], deltas=self.deltas[chosen])

    def weighted_sum(self, weights: Tensor) -> "LayerCall":
        """Return the call of one victim whose gradients are all victims', summed with ``weights`` (V,)."""
        factors = weights.to(self.deltas).view(-1, *(1 for _ in self.deltas.shape[1:]))
        inputs, deltas = self.inputs.flatten(0, 1), (factors * self.deltas).flatten(0, 1)
        return replace(self, inputs=inputs.unsqueeze(0), deltas=deltas.unsqueeze(0))


Gradients = Callable[[LayerCall, Collection[str]], Tensors]
"""(call, own names of parameters) -> their gradients (V, *shape) by these names."""

Factors = Callable[[LayerCall], tuple[Tensor, Tensor] | None]
"""(call) -> ``deltas`` (V, O, P) and ``inputs`` (V, D, P) whose product over the positions P is the gradient of
``weight``; ``None`` where this module has no such form."""


_RULES: dict[type[nn.Module], tuple[Gradients, Factors | None]] = {}
"""Gradients of a type of layer, and the factors of its weight's gradient, if any."""


def register_layer_rule(*types: type[nn.Module], factors: Factors | None = None) -> Callable[[Gradients], Gradients]:
    """Decorate the gradients of layers of exactly these ``types``."""

    def register(gradients: Gradients) -> Gradients:
        _RULES.update(dict.fromkeys(types, (gradients, factors)))
        return gradients

    return register


def parameter_gradients(call: LayerCall, names: Collection[str]) -> Tensors:
    """Compute the gradient (V, *shape) of the layer's parameters ``names``."""
    gradients, _ = _RULES.get(type(call.module), (_by_vjp, None))
    return gradients(call, names)


def weight_factors(call: LayerCall) -> tuple[Tensor, Tensor] | None:
    """Return factors ``deltas`` (V, O, P) and ``inputs`` (V, D, P) of the weight's gradient, if any."""
    _, factors = _RULES.get(type(call.module), (_by_vjp, None))
    return factors(call) if factors else None


@register_layer_rule(nn.Linear, factors=lambda call: (call.deltas.flatten(1, -2).mT, call.inputs.flatten(1, -2).mT))
def _linear(call: LayerCall, names: Collection[str]) -> Tensors:
    deltas, inputs = call.deltas.flatten(1, -2), call.inputs.flatten(1, -2)
    gradients = {"weight": deltas.mT @ inputs} if "weight" in names else {}
    return {**gradients, "bias": deltas.sum(1)} if "bias" in names else gradients


def _convolution_factors(call: LayerCall) -> tuple[Tensor, Tensor] | None:
    module = call.module
    assert isinstance(module, nn.Conv2d)
    if module.groups != 1 or not pads_with_zeros(module):
        return None
    columns = unfolded(module, call.inputs, (module.stride, module.padding, module.dilation))[:, :, 0]
    return _merge_images(call.deltas.flatten(-2)), _merge_images(columns)


@register_layer_rule(nn.Conv2d, FrozenConv2d, factors=_convolution_factors)
def _convolution(call: LayerCall, names: Collection[str]) -> Tensors:
    module, inputs, deltas = call.module, call.inputs, call.deltas
    assert isinstance(module, nn.Conv2d)
    if "weight" not in names:
        return {"bias": deltas.sum((1, -2, -1))} if "bias" in names else {}
    weight, bias = convolution_gradients(module, inputs, deltas, with_bias="bias" in names)
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


@register_layer_rule(Affine, FrozenNorm, FoldedConvolution)
def _by_itself(call: LayerCall, names: Collection[str]) -> Tensors:
    assert isinstance(call.module, Affine | FrozenNorm | FoldedConvolution)
    return call.module.gradients(call.inputs, call.deltas, names)


def _merge_images(values: Tensor) -> Tensor:
    """Merge images, (V, B, N, T) -> (V, N, B T)."""
    return values.squeeze(1) if values.shape[1] == 1 else values.transpose(1, 2).flatten(2)


def _by_vjp(call: LayerCall, names: Collection[str]) -> Tensors:
    parameters = {name: p for name, p in call.module.named_parameters() if name in names}

    def pull_back(inputs: Tensor, delta: Tensor) -> Tensors:
        back = vjp(lambda values: functional_call(call.module, values, (inputs,)), parameters)[1]
        gradients: Tensors = back(delta)[0]
        return gradients

    result: Tensors = vmap(pull_back)(call.inputs, call.deltas)
    return result
