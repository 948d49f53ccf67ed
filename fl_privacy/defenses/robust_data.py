"""Robust data: noise to the eye, the client's data to the model (Refiner, Eq. 2 to 4), as pixels or word embeddings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.defenses.defense import LocalStep
from fl_privacy.models.gradients import example_gradients, gradient_by_inputs, plain_attention
from fl_privacy.models.gradients.hooks import entering, owners
from fl_privacy.models.pretrained.evaluator import WordBox, WordEvaluator, uniform_noise
from fl_privacy.models.pretrained.evaluator_files import CachedEvaluator
from fl_privacy.progress import counted
from fl_privacy.types import Batch, ModelState, Tensors

Elementwise = Literal["product", "gradient", "value", "none"]
"""Importance of an element: |gradient x value|, |gradient|, |value|, or constant."""

Importance = Literal[Elementwise, "integrated_gradients"]
"""Also |value x mean gradient on the line from zero to the values| (appendix A), by extra passes."""

Gap = Callable[[Tensor], Tensor]
"""Robust data (B, ...) -> utility gap (G,), differentiable: of the batch (G = 1) or of each example (G = B)."""

Privacy = Callable[[Tensor], Tensor]
"""Robust data (B, ...) -> (B,), differentiable; higher is more private."""


def importance(target: Tensors, values: Tensors, depths: dict[str, int], *, by: Elementwise, decay: float) -> Tensors:
    """Weight each element in the utility metric (Eq. 3): |g theta| tau^i in layer i; tau is ``decay``.

    ``target`` holds gradients to match, (*shape) or (B, *shape), ``depths`` i, by name.
    """
    elements: Callable[[Tensor, Tensor], Tensor] = {
        "product": torch.mul,
        "gradient": lambda g, value: g,
        "value": lambda g, value: value.expand_as(g),
        "none": lambda g, value: torch.ones_like(g),
    }[by]
    return {name: elements(g, values[name].detach()).abs() * decay ** depths[name] for name, g in target.items()}


AsInputs = Callable[[Tensor], Tensor]
"""Robust data (B, ...) in [0, 1] -> model inputs, differentiable."""


def batch_gap(step: LocalStep, target: Tensors, weights: Tensors, as_inputs: AsInputs, start: Tensor) -> Gap:
    """Build UM (Eq. 4) of the gradient of a batch's mean loss: the sum of (weight (gradient - target))^2."""
    like = Batch(as_inputs(start), step.batch.labels)
    gradient = gradient_by_inputs(step.model, step.sent, like, list(target), plan=step.plan, changes=step.changes)

    def gap(images: Tensor) -> Tensor:
        found = gradient(as_inputs(images))
        terms = [(weights[name] * (found[name] - t)).square().sum() for name, t in target.items()]
        return torch.stack(terms).sum().unsqueeze(0)

    return gap


def example_gap(step: LocalStep, target: Tensors, weights: Tensors, as_inputs: AsInputs) -> Gap:
    """Build UM (Eq. 4) of each example's own gradient; ``target`` and ``weights`` are (B, *shape)."""

    def gap(images: Tensor) -> Tensor:
        found = own_gradients(step, as_inputs(images))
        terms = [(weights[name] * (found[name] - t)).reshape(len(t), -1).square().sum(1) for name, t in target.items()]
        return torch.stack(terms).sum(0)

    return gap


def own_gradients(step: LocalStep, inputs: Tensor) -> Tensors:
    """Compute the gradient (B, *shape) of each example's loss, differentiable by ``inputs``."""
    batch = Batch(inputs, step.batch.labels)
    values = ModelState({n: p.detach() for n, p in step.sent.parameters.items()}, step.sent.buffers)
    return example_gradients(step.model, values, batch, plan=step.plan, changes=step.changes)


def descend(
    start: Tensor, gap: Gap, privacy: Privacy, *, unit: Tensor, beta: float, lr: float, iterations: int
) -> Iterator[Tensor]:
    """Minimize UM / unit - beta PM (Eq. 2) by gradient descent; yield each iterate, clamped to [0, 1].

    The slope is that of the sum over the batch, so that the batch size does not change an example's step. Down UM the
    step is at most Polyak's, UM / ||slope||^2. ``start`` is (B, C, H, W) in [0, 1], or (B, L, d) of words, ``privacy``
    the PM of each example, ``unit`` (G,).
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
    """Return the point nearest to ``gradient`` within the l2 distance ``radius`` of ``center`` (appendix J).

    The distance in float64 is at most ``radius`` also after rounding.
    """
    apart = {name: (gradient[name] - c).double() for name, c in center.items()}
    length = torch.stack([a.square().sum() for a in apart.values()]).sum().sqrt()
    if float(length) <= radius:
        return {name: gradient[name] for name in center}
    return {name: c + (radius / length * apart[name]).to(c) for name, c in center.items()}


def layer_depths(model: nn.Module, state: ModelState, inputs: Tensor) -> dict[str, int]:
    """Return the number of each parameter's layer, from 1 in the order of the forward pass.

    Weight and bias share a number. Layers that are not called come last.
    """
    layers = owners(model)
    model.eval()
    values = {name: t.detach() for name, t in {**state.parameters, **state.buffers}.items()}
    with torch.no_grad(), entering(layers) as calls:
        functional_call(model, values, (inputs,))
    depths = {name: depth for depth, name in enumerate(dict.fromkeys(call.name for call in calls), start=1)}
    return {name: depths.get(name.rpartition(".")[0], len(layers)) for name in state.parameters}


Judge = Literal["evaluator", "mse"]
"""Privacy metric of robust data: the evaluation network, or the mean squared distance to the true ones."""


@dataclass(frozen=True, eq=False)
class Pixels:
    """Robust space of the images ``true`` (B, C, H, W) in [0, 1], with uniform noise."""

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
    """Robust space of texts: coordinates (B, L, d) of word embeddings, with random words as noise (appendix F).

    The embedding layer is neither trained nor uploaded, hence ``withheld``. ``tokens`` are (B, L), padded with -1.
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


RobustSpace = Pixels | RobustTexts
"""Coordinates in [0, 1] of the inputs of a batch, (B, ...)."""
