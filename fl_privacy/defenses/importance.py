"""What parameters are important by, beyond their values and gradients (Refiner, appendix A).

Integrated Gradients go along the line from a model without any weights to the one at hand; Neuron Shapley takes neurons
away one after the other, in random orders. Both cost many passes a step.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fl_privacy.defenses.defense import LocalStep
from fl_privacy.models.gradients import batch_loss, loss_gradients, plain_attention
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.types import ModelState, Tensors

POINTS = 20
"""Of the line along which gradients are integrated."""

PERMUTATIONS = 10
"""Orders in which neurons are taken away."""

_VECTORIZED = 16
"""Examples up to which the points of a line are computed at once: in larger batches single passes are faster."""

_CHUNK_ELEMENTS = 1 << 24
"""Elements of parameters that are held at a time (64 MB)."""


def integrated_gradients(
    values: Tensors, gradient_at: Callable[[Tensors], Tensors], *, points: int = POINTS
) -> Tensors:
    """Compute value x mean gradient on the line from zero to ``values`` (Sundararajan et al. 2017, Eq. 1 and 3).

    Taken at the middles of ``points`` equal pieces of the line; the sum over all elements comes to what the loss at
    ``values`` has more than that at zero.

    Args:
        values: of the parameters, by name.
        gradient_at: values -> gradients by name, of their shapes or with a dimension more in front.
        points: m, at least 1.
    """
    sums: dict[str, Tensor] = {}
    for number in range(points):
        found = gradient_at({name: value * ((number + 0.5) / points) for name, value in values.items()})
        sums = {name: sums[name] + g if sums else g for name, g in found.items()}
    return {name: values[name] * total / points for name, total in sums.items()}


def integrated_gradients_of_step(step: LocalStep, *, points: int = POINTS) -> Tensors:
    """Compute the Integrated Gradients of the batch's mean loss, by the name of each parameter of ``step``."""
    values = {name: value.detach() for name, value in step.sent.parameters.items()}
    if len(step.batch) <= _VECTORIZED:
        try:
            return _at_once(step, values, points)
        except RuntimeError:  # layers that can't be batched, as batch norm in training mode
            pass
    return integrated_gradients(values, lambda at: gradient_at(step, at), points=points)


def gradient_at(step: LocalStep, values: Tensors) -> Tensors:
    """Compute the gradient of the batch's mean loss with the model's parameters at ``values``."""
    return loss_gradients(
        step.model,
        ModelState(values, step.sent.buffers),
        step.batch,
        batch_norm=step.plan.batch_norm,
        loss_scale=step.plan.loss_scale,
        changes=step.changes,
    ).gradients


def _at_once(step: LocalStep, values: Tensors, points: int) -> Tensors:
    """Compute the same with all points in one pass."""
    gradient = grad(lambda at: _loss(step, at))
    shares = (torch.arange(points, device=step.batch.inputs.device) + 0.5) / points
    chunk = max(1, _CHUNK_ELEMENTS // max(1, sum(value.numel() for value in values.values())))
    along = vmap(
        lambda share: gradient({n: share.to(v.dtype) * v for n, v in values.items()}),
        randomness="different",
        chunk_size=chunk,
    )
    with plain_attention():
        found = along(shares)
    return {name: values[name] * g.mean(0) for name, g in found.items()}


def _loss(step: LocalStep, values: Tensors) -> Tensor:
    plan, state = step.plan, ModelState(values, step.sent.buffers)
    return batch_loss(
        step.model, state, step.batch, batch_norm=plan.batch_norm, loss_scale=plan.loss_scale, changes=step.changes
    )[0]


def neuron_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose outputs are neurons: convolutions, by channel, and linear layers."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


class _Network:
    """The model of a step, of which neurons can be taken away: they then say what they say on average."""

    def __init__(self, step: LocalStep) -> None:
        self._step, layers = step, neuron_layers(step.model)
        with torch.no_grad(), leaving(layers) as calls:
            self.whole = float(_loss(step, step.sent.parameters))
        self._means = {call.module: call.output.mean(0) for call in calls}
        self._layers = {name: module for name, module in layers.items() if module in self._means}
        self._gone: dict[nn.Module, Tensor] = {}
        self.neurons = [(name, k) for name, module in self._layers.items() for k in range(_neurons(module))]
        self.put_back()

    def put_back(self) -> None:
        """Have all neurons again."""
        device = self._step.batch.inputs.device
        self._gone = {
            module: torch.zeros(_neurons(module), dtype=torch.bool, device=device) for module in self._layers.values()
        }

    def zeros(self) -> dict[str, Tensor]:
        """Return zeros (C,) for the neurons of each layer."""
        return {name: torch.zeros(_neurons(module)) for name, module in self._layers.items()}

    def take(self, name: str, number: int) -> None:
        """Take away a neuron."""
        self._gone[self._layers[name]][number] = True

    def loss(self) -> float:
        """Compute the mean loss of the batch with the neurons that are left."""
        with torch.no_grad(), leaving(self._layers, lambda module, _, output: self._left(module, output)):
            return float(_loss(self._step, self._step.sent.parameters))

    def _left(self, module: nn.Module, output: Tensor) -> Tensor:
        mean, gone = self._means[module], self._gone[module]
        if not isinstance(module, nn.Linear):
            gone = gone.view(-1, *[1] * (mean.dim() - 1))
        return torch.where(gone, mean, output)


def _neurons(module: nn.Module) -> int:
    return len(module.get_parameter("weight"))


def neuron_shapley(step: LocalStep, *, permutations: int = PERMUTATIONS) -> dict[str, Tensor]:
    """Estimate what each neuron takes off the batch's mean loss, (C,) by layer (Ghorbani and Zou 2020).

    In random orders, drawn from the stream of the defense, neurons are taken away one by one: their output becomes its
    mean over the batch. What the loss rises by is averaged over the orders. An order is cut short (truncation) where
    the loss has risen to that of the model without any neuron: those that are left count for nothing in it.

    Args:
        step: whose model, values and batch.
        permutations: orders, at least 1.
    """
    network = _Network(step)
    for name, number in network.neurons:
        network.take(name, number)
    nothing = network.loss()
    values = network.zeros()
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
    """Give each element of a neuron's weights and bias the neuron's Shapley value, by the name of each parameter.

    Parameters that belong to no neuron, as those of normalization, are not in it.
    """
    values, parameters = neuron_shapley(step, permutations=permutations), step.sent.parameters
    found = {}
    for layer, own in values.items():
        for name in (f"{layer}.weight".lstrip("."), f"{layer}.bias".lstrip(".")):
            if name in parameters:
                like = parameters[name]
                found[name] = own.to(like).view(-1, *[1] * (like.dim() - 1)).expand_as(like)
    return found
