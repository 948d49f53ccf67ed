"""Importance of parameters by Integrated Gradients or Neuron Shapley (Refiner, appendix A), many passes a step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fl_privacy.defenses.defense import LocalStep
from fl_privacy.models.gradients import plain_attention
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.types import ModelState, Tensors

POINTS = 20  # number of points on the line of Integrated Gradients
PERMUTATIONS = 10  # number of random orders of Neuron Shapley

_VECTORIZED = 16  # largest batch whose points are computed at once; for larger ones single passes are faster
_CHUNK_ELEMENTS = 1 << 24  # elements of parameters held at once (64 MB)


def integrated_gradients(
    values: Tensors, gradient_at: Callable[[Tensors], Tensors], *, points: int = POINTS
) -> Tensors:
    """Compute value x mean gradient on the line from zero to ``values`` (Sundararajan et al. 2017, Eq. 1 and 3).

    The gradient is taken at the middles of ``points`` equal pieces. The sum over all elements approximates the loss at
    ``values`` minus that at zero. ``gradient_at`` turns values into gradients, in their shapes or with one more leading
    dimension.
    """
    sums: dict[str, Tensor] = {}
    for number in range(points):
        found = gradient_at({name: value * ((number + 0.5) / points) for name, value in values.items()})
        sums = {name: sums[name] + g if sums else g for name, g in found.items()}
    return {name: values[name] * total / points for name, total in sums.items()}


def integrated_gradients_of_step(step: LocalStep, *, points: int = POINTS) -> Tensors:
    """Compute the Integrated Gradients of the batch's mean loss, by parameter name."""
    values = {name: value.detach() for name, value in step.sent.parameters.items()}
    if len(step.batch) <= _VECTORIZED:
        try:
            return _at_once(step, values, points)
        except RuntimeError:  # layers that can't be batched, as batch norm in training mode
            pass
    return integrated_gradients(values, lambda at: _at(step, at).gradients().gradients, points=points)


def _at(step: LocalStep, values: Tensors) -> LocalStep:
    return replace(step, sent=ModelState(values, step.sent.buffers))


def _at_once(step: LocalStep, values: Tensors, points: int) -> Tensors:
    gradient = grad(lambda at: _at(step, at).loss())
    shares = (torch.arange(points, device=step.batch.inputs.device) + 0.5) / points
    chunk = max(1, _CHUNK_ELEMENTS // max(1, sum(value.numel() for value in values.values())))

    def along(share: Tensor) -> Tensors:
        found: Tensors = gradient({n: share.to(v.dtype) * v for n, v in values.items()})
        return found

    with plain_attention():
        found = vmap(along, randomness="different", chunk_size=chunk)(shares)
    return {name: values[name] * g.mean(0) for name, g in found.items()}


class _Network:
    def __init__(self, step: LocalStep) -> None:
        # layers whose outputs are neurons: convolutions, by channel, and linear layers
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
        layers = {name: module for name, module in step.model.named_modules() if isinstance(module, kinds)}
        self._step = step
        with torch.no_grad(), leaving(layers) as calls:
            self.whole = float(step.loss())
        self._means = {call.module: call.output.mean(0) for call in calls}
        self._layers = {name: module for name, module in layers.items() if module in self._means}
        self.counts = {name: len(module.get_parameter("weight")) for name, module in self._layers.items()}
        self._gone: dict[nn.Module, Tensor] = {}
        self.neurons = [(name, k) for name, count in self.counts.items() for k in range(count)]
        self.put_back()

    def put_back(self) -> None:
        device = self._step.batch.inputs.device
        taken = {name: torch.zeros(count, dtype=torch.bool, device=device) for name, count in self.counts.items()}
        self._gone = {self._layers[name]: gone for name, gone in taken.items()}

    def take(self, name: str, number: int) -> None:
        self._gone[self._layers[name]][number] = True

    def loss(self) -> float:
        def left(module: nn.Module, _: object, output: Tensor) -> Tensor:
            mean, gone = self._means[module], self._gone[module]
            if not isinstance(module, nn.Linear):
                gone = gone.view(-1, *[1] * (mean.dim() - 1))
            return torch.where(gone, mean, output)

        with torch.no_grad(), leaving(self._layers, left):
            return float(self._step.loss())


def neuron_shapley(step: LocalStep, *, permutations: int = PERMUTATIONS) -> dict[str, Tensor]:
    """Estimate each neuron's reduction of the batch's mean loss, (C,) by layer (Ghorbani and Zou 2020).

    In random orders, neurons are replaced one by one by their mean output, and the rises of the loss averaged. An order
    is truncated when the loss reaches that without any neuron; the remaining neurons count 0.
    """
    network = _Network(step)
    for name, number in network.neurons:
        network.take(name, number)
    nothing = network.loss()
    values = {name: torch.zeros(count) for name, count in network.counts.items()}
    for _ in range(permutations):
        network.put_back()
        before = network.whole
        for place in torch.randperm(len(network.neurons), generator=step.rng, device=step.rng.device).tolist():
            if network.whole < nothing <= before:
                break
            name, number = network.neurons[place]
            network.take(name, number)
            after = network.loss()
            values[name][number] += (after - before) / permutations
            before = after
    return values


def shapley_of_elements(step: LocalStep, *, permutations: int = PERMUTATIONS) -> Tensors:
    """Return the Shapley value of its neuron for each weight and bias, by parameter name."""
    values, parameters = neuron_shapley(step, permutations=permutations), step.sent.parameters
    found = {}
    for layer, own in values.items():
        for name in (f"{layer}.weight".lstrip("."), f"{layer}.bias".lstrip(".")):
            if name in parameters:
                like = parameters[name]
                found[name] = own.to(like).view(-1, *[1] * (like.dim() - 1)).expand_as(like)
    return found
