"""Gradients of many victims, layer by layer: one pass over all images, then one grouped product per layer."""

# The method is that of per-example clipping (Goodfellow 2015; Li et al. 2022). If the number P of positions is small,
# the weight gradient G = delta U', with output gradients delta (O, P) and inputs U (D, P), is not formed. An undefended
# observed gradient G* = L C R', with orthonormal L and R, also has rank P: its squared distance from G is
# |L' G R - C|^2 plus the squared norm of the part of G outside the spans of L and R.

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fl_privacy.models.gradients import convolution
from fl_privacy.models.gradients.convolution import Affine, FrozenNorm, separated_copy
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.models.gradients.victims import VictimGradients, VictimModel
from fl_privacy.models.losses import is_plain
from fl_privacy.types import Tensors


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Record of a layer's inputs and output gradients, in one pass over the batches of V victims (attacked clients)."""

    module: nn.Module
    names: Mapping[str, str]  # name of each wanted parameter in the layer -> its name in the model
    inputs: Tensor  # (V, B, ...) inputs of the layer
    deltas: Tensor  # (V, B, ...) gradient of the victims' losses with respect to the layer's outputs

    @property
    def positions(self) -> int:
        outputs = self.deltas.shape[2] if isinstance(self.module, nn.Conv2d) else self.deltas.shape[-1]
        return self.deltas[0].numel() // outputs

    def rows(self, chosen: slice) -> "LayerCall":
        return replace(self, inputs=self.inputs[chosen], deltas=self.deltas[chosen])

    def weighted_sum(self, weights: Tensor) -> "LayerCall":
        """Merge V victims' calls into one, whose gradient is the sum of theirs times ``weights`` (V,)."""
        factors = weights.to(self.deltas).view(-1, *(1 for _ in self.deltas.shape[1:]))
        inputs, deltas = self.inputs.flatten(0, 1), (factors * self.deltas).flatten(0, 1)
        return replace(self, inputs=inputs.unsqueeze(0), deltas=deltas.unsqueeze(0))


Gradients = Callable[[LayerCall, Collection[str]], Tensors]
"""Function (call, names of parameters in the layer) -> gradients (V, *shape) by these names."""

CallFactors = Callable[[LayerCall], tuple[Tensor, Tensor] | None]
"""Function (call) -> ``deltas`` (V, O, P) and ``inputs`` (V, D, P) whose product over positions P is the gradient with
respect to ``weight``; ``None`` if the module has no such factors."""


_RULES: dict[type[nn.Module], tuple[Gradients, CallFactors | None]] = {}
"""Class of a layer -> function for its gradients, and for the factors of its weight's gradient, if any."""


def register_layer_rule(
    *types: type[nn.Module], factors: CallFactors | None = None
) -> Callable[[Gradients], Gradients]:
    """Register the decorated function to compute the gradients of layers of exactly these ``types``.

    It takes a :class:`LayerCall` and names of parameters, and returns gradients (V, *shape) by name. ``factors``:
    function for :func:`weight_factors`. Layers without a rule use ``torch.func``.
    """

    def register(gradients: Gradients) -> Gradients:
        _RULES.update(dict.fromkeys(types, (gradients, factors)))
        return gradients

    return register


def parameter_gradients(call: LayerCall, names: Collection[str]) -> Tensors:
    """Return V victims' gradients (V, *shape) with respect to the parameters ``names`` of the called layer."""
    gradients, _ = _RULES.get(type(call.module), (_by_vjp, None))
    return gradients(call, names)


def weight_factors(call: LayerCall) -> tuple[Tensor, Tensor] | None:
    """Return two factors whose product is the gradient of a layer's weight; ``None`` if its type has none.

    Their shapes are (V, outputs, P) and (V, inputs, P), for V victims and P pixels or tokens of all examples.
    """
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
    if module.groups != 1 or not convolution.pads_with_zeros(module):
        return None
    columns = convolution.unfolded(module, call.inputs, (module.stride, module.padding, module.dilation))[:, :, 0]
    return _merge_images(call.deltas.flatten(-2)), _merge_images(columns)


@register_layer_rule(nn.Conv2d, convolution.FrozenConv2d, factors=_convolution_factors)
def _convolution(call: LayerCall, names: Collection[str]) -> Tensors:
    module, inputs, deltas = call.module, call.inputs, call.deltas
    assert isinstance(module, nn.Conv2d)
    if "weight" not in names:
        return {"bias": deltas.sum((1, -2, -1))} if "bias" in names else {}
    weight, bias = convolution.convolution_gradients(module, inputs, deltas, with_bias="bias" in names)
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


@register_layer_rule(Affine, FrozenNorm, convolution.FoldedConvolution)
def _by_itself(call: LayerCall, names: Collection[str]) -> Tensors:
    assert isinstance(call.module, Affine | FrozenNorm | convolution.FoldedConvolution)
    return call.module.gradients(call.inputs, call.deltas, names)


def _merge_images(values: Tensor) -> Tensor:
    return values.squeeze(1) if values.shape[1] == 1 else values.transpose(1, 2).flatten(2)


def _by_vjp(call: LayerCall, names: Collection[str]) -> Tensors:
    parameters = {name: p for name, p in call.module.named_parameters() if name in names}

    def pull_back(inputs: Tensor, delta: Tensor) -> Tensors:
        back = vjp(lambda values: functional_call(call.module, values, (inputs,)), parameters)[1]
        return cast(Tensors, back(delta)[0])

    return vmap(pull_back)(call.inputs, call.deltas)


_SPARE = 4
_EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True, eq=False)
class Factors:
    """Factors of V matrices ``left core right'``: orthonormal left (V, O, r) and right (V, D, q), core (V, r, q)."""

    left: Tensor
    core: Tensor
    right: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Factors":
        return Factors(change(self.left), change(self.core), change(self.right))


def pays(outputs: int, inputs: int, positions: int) -> bool:
    """Return whether comparing weight gradients by their factors (layer inputs, output gradients) saves operations.

    ``positions``: number of places at which the layer is applied, such as pixels.
    """
    return 3 * positions * (outputs + inputs) < outputs * inputs


def factorize(value: Tensor, rank: int) -> Factors | None:
    """Return low-rank factors of V matrices ``value``; ``None`` if a matrix's rank is above ``rank``."""
    columns = min(rank + _SPARE, *value.shape[1:])
    probe = torch.randn(value.shape[2], columns, generator=torch.Generator().manual_seed(0)).to(value)
    # Halko, Martinsson, Tropp 2011, Alg. 4.1
    left = torch.linalg.qr(value @ probe).Q
    right, core = torch.linalg.qr(value.mT @ left)
    residual = torch.baddbmm(value, left @ core.mT, right.mT, alpha=-1).flatten(1).norm(dim=1)
    if (residual > _EXACT[value.dtype] * value.flatten(1).norm(dim=1)).any():
        return None
    return Factors(left, core.mT.contiguous(), right)


_TOLERANCE, _ROUNDING = 1e-3, 1e-6
_SMALL = 1 << 14  # number of elements up to which a gradient is always formed


class NotLayeredError(RuntimeError):
    """Raised for models that can't be split into layers."""


class Layered(VictimGradients):
    """Computes the gradients of all victims (attacked batches) in one forward and one backward pass."""

    def __init__(self, victim_model: VictimModel) -> None:
        self._victim_model = victim_model
        self._model, renamed, self._victims = separated_copy(victim_model.model)
        for parent in list(self._model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Conv2d and convolution.pads_with_zeros(child):
                    setattr(parent, name, convolution.convolution_as(convolution.FrozenConv2d, child))
        self._names = {id(self._model.get_parameter(renamed[name])): name for name in victim_model.names}
        self._fold(())

    def folded(self, inputs: Tensor) -> Self:
        """Fold norms into convolutions if that is faster for V victims' inputs (V, B, ...), and return this object."""
        self._victims.count = len(inputs)
        self._fold(convolution.foldable(self._model, inputs.flatten(0, 1)))
        return self

    def under(self, victim_model: VictimModel) -> Self:
        other = super().under(victim_model)
        other._fold(self._pairs)
        return other

    def _fold(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        convolution.fold(self._model, pairs)
        self._layers = dict(_layers(self._model, self._names))

    def __call__(self, inputs: Tensor, labels: Tensor, hidden: Tensor | None = None) -> Tensors:
        return self.gradients_and_products(inputs, labels, (), hidden)[0]

    def gradients_and_products(
        self, inputs: Tensor, labels: Tensor, factored: Collection[str], hidden: Tensor | None = None
    ) -> tuple[Tensors, dict[str, tuple[Tensor, Tensor]]]:
        """Return gradients by name, and the factors of those weights in ``factored`` that have factors.

        See :func:`weight_factors` for factors, and :meth:`passed` for ``hidden``.
        """
        gradients: dict[str, Tensor] = {}
        products: dict[str, tuple[Tensor, Tensor]] = {}
        for call in self.calls(inputs, labels, hidden):
            own = call.names
            if own.get("weight") in factored and (factors := weight_factors(call)):
                products[own["weight"]] = factors
                own = {own_name: name for own_name, name in own.items() if own_name != "weight"}
            add_up(gradients, own, parameter_gradients(call, own.keys()))
        return gradients, products

    def ranks(self, inputs: Tensor, labels: Tensor) -> dict[str, int]:
        found = {}
        for weight, call in self._called_once(inputs, labels).items():
            if (factors := weight_factors(call)) is not None:
                (_, outputs, rank), columns = factors[0].shape, factors[1].shape[1]
                if outputs * columns > _SMALL and pays(outputs, columns, rank):
                    found[weight] = rank
        return found

    def linear_weights(self, inputs: Tensor, labels: Tensor) -> list[str]:
        called = self._called_once(inputs, labels)
        return [weight for weight, call in called.items() if type(call.module) is nn.Linear and weight_factors(call)]

    def _called_once(self, inputs: Tensor, labels: Tensor) -> dict[str, LayerCall]:
        calls = [call for call in self.calls(inputs, labels) if "weight" in call.names]
        times = Counter(call.names["weight"] for call in calls)
        return {call.names["weight"]: call for call in calls if times[call.names["weight"]] == 1}

    def expect_right_factors(self, inputs: Tensor, labels: Tensor) -> None:
        for call in self.calls(inputs, labels):
            factors = weight_factors(call) if "weight" in call.names else None
            if factors is None:
                continue
            deltas, columns = (part.detach() for part in factors)
            gradient = parameter_gradients(call, ["weight"])["weight"].detach()
            product = deltas @ columns.mT
            rounding = _ROUNDING * deltas.norm() * columns.norm()
            if product.numel() != gradient.numel() or (
                (product.reshape(gradient.shape) - gradient).norm() > _TOLERANCE * gradient.norm() + rounding
            ):
                raise NotLayeredError(f"the factors of {call.names['weight']} do not give its gradient")

    def calls(self, inputs: Tensor, labels: Tensor, hidden: Tensor | None = None) -> list[LayerCall]:
        return self.passed(inputs, labels, hidden)[1]

    def passed(self, inputs: Tensor, labels: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, list[LayerCall]]:
        """Return the sum of V victims' losses, detached, and the recorded call of each layer.

        The calls are differentiable with respect to ``inputs`` (V, B, ...). ``hidden`` (V, B, F): gradient of a second,
        secret loss with respect to the inputs of the layer whose weight is called ``victim_model.hidden``.
        """
        count, size = inputs.shape[:2]
        create_graph = torch.is_grad_enabled()
        modules = {path: self._model.get_submodule(path) for path in self._layers}
        with torch.enable_grad(), leaving(modules, _tracked) as tape:
            self._victims.count = count
            logits, own_loss = self._model(inputs.flatten(0, 1)), self._victim_model.loss
            if is_plain(own_loss):
                loss = F.cross_entropy(logits, labels.flatten(0, 1), reduction="sum")
            else:  # user functions are not batched
                of_each = zip(logits.reshape(count, size, -1), labels, strict=True)
                loss = size * torch.stack([own_loss(own, own_labels) for own, own_labels in of_each]).sum()
            if hidden is not None:
                weights = {self._layers[call.name].get("weight"): call.inputs for call in reversed(tape)}
                loss = loss + (hidden.flatten(0, 1) * weights[self._victim_model.hidden]).sum()
            loss = self._victim_model.plan.loss_scale / size * loss
            seen = {name for call in tape for name in self._layers[call.name].values()}
            if unseen := set(self._victim_model.names) - seen:
                raise NotLayeredError(f"{min(unseen)} belongs to no layer that was called")
            deltas = torch.autograd.grad(
                loss, [call.output for call in tape], create_graph=create_graph, materialize_grads=True
            )
        found = []
        for call, delta in zip(tape, deltas, strict=True):
            apart = (values.reshape(count, size, *values.shape[1:]) for values in (call.inputs, delta))
            found.append(LayerCall(call.module, self._layers[call.name], *apart))
        return loss.detach(), found


def _layers(model: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, dict[str, str]]]:
    for path, module in model.named_modules():
        own = module.named_parameters(recurse=False)
        if matched := {own_name: names[id(p)] for own_name, p in own if id(p) in names}:
            yield path, matched


def _tracked(module: nn.Module, given: Sequence[Any], output: Any) -> Tensor:
    if len(given) != 1 or not isinstance(output, Tensor):
        raise NotLayeredError(f"{type(module).__name__} is no function of one tensor to one tensor")
    return output if output.requires_grad else output.requires_grad_()


def add_up(gradients: dict[str, Tensor], names: Mapping[str, str], found: Tensors) -> None:
    """Add a layer's gradients ``found`` to ``gradients``; ``names`` maps the layer's names to the model's."""
    for own_name, gradient in found.items():
        name = names[own_name]
        gradients[name] = gradients[name] + gradient if name in gradients else gradient
