"""Robust data of Refiner: images or word embeddings that look like noise but have nearly the true gradient."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.defenses.defense import LocalStep
from fl_privacy.models.gradients import example_gradients, gradient_by_inputs, plain_attention
from fl_privacy.models.gradients.hooks import entering, leaving, owners
from fl_privacy.models.pretrained.evaluator import WordBox, WordEvaluator, uniform_noise
from fl_privacy.models.pretrained.evaluator_files import CachedEvaluator
from fl_privacy.progress import counted
from fl_privacy.types import Batch, ModelState, Tensors

Elementwise = Literal["product", "gradient", "value", "none"]
"""Importance of a parameter's element: |gradient x value|, |gradient|, |value|, or 1."""

Importance = Literal[Elementwise, "integrated_gradients"]
"""Importance, also by |value x mean gradient on the line from zero to the values| (appendix A)."""

Gap = Callable[[Tensor], Tensor]
"""Function from robust data (B, ...) to the utility metric UM, (1,) of the batch or (B,) of each example."""

Privacy = Callable[[Tensor], Tensor]  # robust data (B, ...) -> PM (B,), differentiable; higher is more private


def importance(target: Tensors, values: Tensors, depths: dict[str, int], *, by: Elementwise, decay: float) -> Tensors:
    """Return the weight of each gradient element in Refiner's distance UM of gradients (Eq. 3): |g theta| tau^i.

    ``target``: gradients g, (*shape) or (B, *shape). ``values``: parameters theta. ``depths``: number i of each
    parameter's layer. ``by``: factors to use: ``product``, ``gradient`` g, ``value`` theta or ``none``. ``decay``: tau.
    """
    elements: Callable[[Tensor, Tensor], Tensor] = {
        "product": torch.mul,
        "gradient": lambda g, value: g,
        "value": lambda g, value: value.expand_as(g),
        "none": lambda g, value: torch.ones_like(g),
    }[by]
    return {name: elements(g, values[name].detach()).abs() * decay ** depths[name] for name, g in target.items()}


AsInputs = Callable[[Tensor], Tensor]  # robust data (B, ...) in [0, 1] -> model inputs, differentiable


def batch_gap(step: LocalStep, target: Tensors, weights: Tensors, as_inputs: AsInputs, start: Tensor) -> Gap:
    """Return a function from robust data to UM, the weighted squared distance of their gradient to ``target`` (Eq. 4).

    Robust data are Refiner's noise-like images or texts, shaped like ``start``, which replace the batch. ``as_inputs``:
    function from robust data to model inputs.
    """
    like = Batch(as_inputs(start), step.batch.labels)
    gradient = gradient_by_inputs(step.model, step.sent, like, list(target), plan=step.plan, changes=step.changes)

    def gap(images: Tensor) -> Tensor:
        found = gradient(as_inputs(images))
        terms = [(weights[name] * (found[name] - t)).square().sum() for name, t in target.items()]
        return torch.stack(terms).sum().unsqueeze(0)

    return gap


def example_gap(step: LocalStep, target: Tensors, weights: Tensors, as_inputs: AsInputs) -> Gap:
    """Return a function from robust data (B, ...) to the distances UM (B,) of their gradients from ``target``.

    It is :func:`batch_gap` for single examples: ``target`` has a gradient (B, *shape) of each.
    """

    def gap(images: Tensor) -> Tensor:
        found = own_gradients(step, as_inputs(images))
        terms = [(weights[name] * (found[name] - t)).reshape(len(t), -1).square().sum(1) for name, t in target.items()]
        return torch.stack(terms).sum(0)

    return gap


def own_gradients(step: LocalStep, inputs: Tensor) -> Tensors:
    """Return the gradient (B, *shape) of each example's loss by parameter name, differentiable in ``inputs``."""
    batch = Batch(inputs, step.batch.labels)
    values = ModelState({n: p.detach() for n, p in step.sent.parameters.items()}, step.sent.buffers)
    return example_gradients(step.model, values, batch, plan=step.plan, changes=step.changes)


def descend(
    start: Tensor, gap: Gap, privacy: Privacy, *, unit: Tensor, beta: float, lr: float, iterations: int
) -> Iterator[Tensor]:
    """Yield the iterates, in [0, 1], of gradient descent from ``start`` on gap / unit - beta privacy (Refiner, Eq. 2).

    ``start``: images (B, C, H, W), or embedded texts (B, L, d). ``gap``: function to the gradients' distance UM, lower
    is better; ``unit``: its scale, () or (B,), or (1,) for the batch. ``privacy``: function to the privacy metric PM,
    higher is better. The step size is ``lr``, or that of Polyak's rule for gap / unit if smaller.
    """
    images = start
    for _ in counted("refining images", range(iterations)):
        images = images.detach().requires_grad_()
        with torch.enable_grad(), plain_attention():
            distance = gap(images) / unit
            (down,) = torch.autograd.grad(distance.sum(), images)
            (up,) = torch.autograd.grad(privacy(images).sum(), images)
        distance, steepness = distance.detach(), down.flatten(1).square().sum(1)
        if len(distance) == 1:
            steepness = steepness.sum(0, keepdim=True)
        polyak = distance / steepness.clamp_min(torch.finfo(steepness.dtype).tiny)
        step = polyak.clamp_max(lr * len(images) / len(distance)).view(-1, *[1] * (images.dim() - 1))
        images = (images.detach() - step * down + lr * beta * up).clamp(0, 1)
        yield images


def pull_within(gradient: Tensors, center: Tensors, radius: float) -> Tensors:
    """Project ``gradient`` into the l2 ball of ``radius`` around ``center`` (Refiner, appendix J)."""
    apart = {name: (gradient[name] - c).double() for name, c in center.items()}
    length = torch.stack([a.square().sum() for a in apart.values()]).sum().sqrt()
    if float(length) <= radius:
        return {name: gradient[name] for name in center}
    return {name: c + (radius / length * apart[name]).to(c) for name, c in center.items()}


def layer_depths(model: nn.Module, state: ModelState, inputs: Tensor) -> dict[str, int]:
    """Map each parameter to its layer's place in the forward pass, from 1; layers that are not called come last."""
    layers = owners(model)
    model.eval()
    values = {name: t.detach() for name, t in {**state.parameters, **state.buffers}.items()}
    with torch.no_grad(), entering(layers) as calls:
        functional_call(model, values, (inputs,))
    depths = {name: depth for depth, name in enumerate(dict.fromkeys(call.name for call in calls), start=1)}
    return {name: depths.get(name.rpartition(".")[0], len(layers)) for name in state.parameters}


Judge = Literal["evaluator", "mse"]
"""Privacy metric PM of robust data: the evaluation network, or the mean squared distance to the true data."""


@dataclass(frozen=True, eq=False)
class Pixels:
    """Search space of pixels (B, C, H, W) in [0, 1] that look like noise but have nearly the gradient of ``true``."""

    withheld: ClassVar[frozenset[str]] = frozenset()

    true: Tensor
    judge: CachedEvaluator

    def noise(self, rng: torch.Generator) -> Tensor:
        return uniform_noise(self.true, rng)

    def inputs(self, coordinates: Tensor) -> Tensor:
        return coordinates

    def privacy(self, kind: Judge) -> Privacy:
        if kind == "evaluator":
            return self.judge(self.true.shape[1:], self.true.device)
        return lambda images: (images - self.true).flatten(1).square().mean(1)


@dataclass(frozen=True, eq=False)
class RobustTexts:
    """Search space of Refiner for texts: scaled word embeddings (B, L, d) in [0, 1] (appendix F).

    It seeks random words that have nearly the gradient of the texts ``tokens`` (B, L), padded with -1. Embeddings are
    not trained.
    """

    tokens: Tensor
    box: WordBox
    word_weight: str
    judge: WordEvaluator | None

    @property
    def withheld(self) -> frozenset[str]:
        return frozenset({self.word_weight})

    @cached_property
    def true(self) -> Tensor:
        return self.box.words(self.tokens)

    @cached_property
    def _there(self) -> Tensor:
        return self.tokens >= 0

    def noise(self, rng: torch.Generator) -> Tensor:
        return self.box.random_words(self.tokens.shape, rng)

    def inputs(self, coordinates: Tensor) -> Tensor:
        there = self._there.unsqueeze(-1).to(coordinates.dtype)
        return torch.cat([self.box.embeddings(coordinates) * there, there], -1)

    def privacy(self, kind: Judge) -> Privacy:
        if kind == "evaluator":
            assert self.judge is not None
            judge, there = self.judge, self._there
            return lambda words: judge(words, there)
        share = self._there.to(self.true.dtype) / self._there.sum(1, keepdim=True).clamp_min(1)
        return lambda words: ((words - self.true).square().mean(2) * share).sum(1)


RobustSpace = Pixels | RobustTexts  # coordinates in [0, 1] of the inputs of a batch, (B, ...)


POINTS = 20  # number of points on the line of Integrated Gradients
PERMUTATIONS = 10  # number of random orders of Neuron Shapley


def integrated_gradients(
    values: Tensors, gradient_at: Callable[[Tensors], Tensors], *, points: int = POINTS
) -> Tensors:
    """Return value x mean gradient on the line from zero to ``values`` (Sundararajan et al. 2017, Eq. 1 and 3).

    Gradients are taken at the middles of ``points`` equal pieces. ``gradient_at``: function from values to gradients of
    the same shapes, or with one more leading dimension.
    """
    sums: dict[str, Tensor] = {}
    for number in range(points):
        found = gradient_at({name: value * ((number + 0.5) / points) for name, value in values.items()})
        sums = {name: sums[name] + g if sums else g for name, g in found.items()}
    return {name: values[name] * total / points for name, total in sums.items()}


def integrated_gradients_of_step(step: LocalStep, *, points: int = POINTS) -> Tensors:
    """Return the integrated gradients of the batch's mean loss, by parameter name."""
    values = {name: value.detach() for name, value in step.sent.parameters.items()}

    def gradient_at(at: Tensors) -> Tensors:
        return replace(step, sent=ModelState(at, step.sent.buffers)).gradients().gradients

    return integrated_gradients(values, gradient_at, points=points)


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
    """Return estimated Shapley values (C,) of each layer's C neurons for the batch's loss (Ghorbani and Zou 2020).

    In ``permutations`` random orders, neurons are replaced one by one by their mean output; the rise of the loss is
    credited to the neuron. An order ends when the loss reaches that with all neurons replaced; the rest get 0.
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
    """Return, shaped like each parameter, the Shapley value of each element's neuron; see :func:`neuron_shapley`."""
    values, parameters = neuron_shapley(step, permutations=permutations), step.sent.parameters
    found = {}
    for layer, own in values.items():
        for name in (f"{layer}.weight".lstrip("."), f"{layer}.bias".lstrip(".")):
            if name in parameters:
                like = parameters[name]
                found[name] = own.to(like).view(-1, *[1] * (like.dim() - 1)).expand_as(like)
    return found
