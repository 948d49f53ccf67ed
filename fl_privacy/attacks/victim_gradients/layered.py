"""Gradients of the victims layer by layer: one pass over all images, then one grouped product per layer.

This is how per-example gradients are clipped in private training (Goodfellow 2015; Li et al. 2022), with the victim in
the place of the example. The weights are frozen, so that no pass computes a gradient of them as such.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.attacks.low_rank import pays
from fl_privacy.attacks.victim_gradients.base import Setting, VictimGradients
from fl_privacy.attacks.victim_gradients.convolution import freeze_convolutions
from fl_privacy.attacks.victim_gradients.layers import Call, has_weight_factors, parameter_gradients, weight_factors
from fl_privacy.attacks.victim_gradients.normalization import separated_copy
from fl_privacy.types import Tensors


class NotLayeredError(RuntimeError):
    """The model can't be taken apart into layers."""


@dataclass(frozen=True, eq=False)
class _Layer:
    module: nn.Module
    names: dict[str, str]


class Layered(VictimGradients):
    """One forward and one backward pass over the stacked batch."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        separated = separated_copy(setting.model)
        self._model, self._victims = separated.model, separated.victims
        freeze_convolutions(self._model)
        parameters = dict(self._model.named_parameters())
        names = {id(parameters[separated.names[name]]): name for name in setting.names}
        self._layers = list(_layers(self._model, names))

    def __call__(self, inputs: Tensor, labels: Tensor, secrets: Tensor | None = None) -> Tensors:
        """Gradients by name; ``secrets`` as in :meth:`calls`."""
        return self.gradients_and_products(inputs, labels, (), secrets)[0]

    def gradients_and_products(
        self, inputs: Tensor, labels: Tensor, factored: Collection[str], secrets: Tensor | None = None
    ) -> tuple[Tensors, dict[str, tuple[Tensor, Tensor]]]:
        """Gradients by name, but for the weights ``factored``: output gradients (V, O, P) and inputs (V, D, P).

        The names are among those of :meth:`ranks`; ``secrets`` as in :meth:`calls`.
        """
        gradients: dict[str, Tensor] = {}
        products: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, call in self.calls(inputs, labels, secrets):
            own = layer.names
            if own.get("weight") in factored:
                products[own["weight"]] = weight_factors(layer.module, call)
                own = {own_name: name for own_name, name in own.items() if own_name != "weight"}
            _add(gradients, own, parameter_gradients(layer.module, call, own.keys()))
        return gradients, products

    def ranks(self, inputs: Tensor, labels: Tensor) -> dict[str, int]:
        """The weights whose gradient is better not formed, with the rank that it has at most."""
        found: dict[str, int] = {}
        called: set[str] = set()
        for layer, call in self.calls(inputs, labels):
            weight = layer.names.get("weight")
            if weight is None or weight in called or not has_weight_factors(layer.module):
                found.pop(weight or "", None)
                continue
            called.add(weight)
            deltas, columns = weight_factors(layer.module, call)
            if pays(deltas.shape[1], columns.shape[1], deltas.shape[2]):
                found[weight] = deltas.shape[2]
        return found

    def calls(self, inputs: Tensor, labels: Tensor, secrets: Tensor | None = None) -> list[tuple[_Layer, Call]]:
        """Inputs of each call of a layer and the loss's gradient by its outputs, (V, B, ...) each.

        They can be differentiated unless gradients are switched off. With ``secrets`` (V, B, F), another loss sends
        them back into what enters the layer ``setting.secret``.
        """
        count, size = inputs.shape[:2]
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad(), self._recording() as tape:
            self._victims.count = count
            logits = self._model(inputs.flatten(0, 1))
            loss = F.cross_entropy(logits, labels.flatten(0, 1), reduction="sum")
            if secrets is not None:
                loss = loss + (secrets.flatten(0, 1) * self._features(tape)).sum()
            loss = self._setting.plan.loss_scale / size * loss
            if unseen := set(self._setting.names) - {name for layer, _, _ in tape for name in layer.names.values()}:
                raise NotLayeredError(f"{min(unseen)} belongs to no layer that was called")
            deltas = torch.autograd.grad(
                loss, [output for _, _, output in tape], create_graph=create_graph, materialize_grads=True
            )
        return [
            (layer, Call(given.reshape(count, size, *given.shape[1:]), delta.reshape(count, size, *delta.shape[1:])))
            for (layer, given, _), delta in zip(tape, deltas, strict=True)
        ]

    def _features(self, tape: Sequence[tuple[_Layer, Tensor, Tensor]]) -> Tensor:
        """(V B, F) what enters the layer ``setting.secret``."""
        return next(given for layer, given, _ in tape if layer.names.get("weight") == self._setting.secret)

    @contextmanager
    def _recording(self) -> Iterator[list[tuple[_Layer, Tensor, Tensor]]]:
        tape: list[tuple[_Layer, Tensor, Tensor]] = []

        def recorder(layer: _Layer) -> Callable[[nn.Module, Sequence[Tensor], Tensor], Tensor]:
            def record(module: nn.Module, given: Sequence[Tensor], output: Tensor) -> Tensor:
                if len(given) != 1 or not isinstance(output, Tensor):
                    raise NotLayeredError(f"{type(module).__name__} is no function of one tensor to one tensor")
                tracked = output if output.requires_grad else output.requires_grad_()
                tape.append((layer, given[0], tracked))
                return tracked

            return record

        handles = [layer.module.register_forward_hook(recorder(layer)) for layer in self._layers]
        try:
            yield tape
        finally:
            for handle in handles:
                handle.remove()


def _add(gradients: dict[str, Tensor], names: dict[str, str], found: Tensors) -> None:
    for own_name, gradient in found.items():
        name = names[own_name]
        gradients[name] = gradients[name] + gradient if name in gradients else gradient


def _layers(model: nn.Module, names: dict[int, str]) -> Iterator[_Layer]:
    for module in model.modules():
        own = module.named_parameters(recurse=False)
        matched = {own_name: names[id(p)] for own_name, p in own if id(p) in names}
        if matched:
            yield _Layer(module, matched)
