"""Gradients as short vectors, and classifiers of these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.types import Tensors

RANK, STEPS = 256, 200
"""Most coordinates of a classifier, and steps of its training."""

SKETCH = 4096
"""Length of a sketch; inner products of gradients are kept to about 2 %."""


@dataclass(frozen=True, eq=False)
class GradientSketch:
    """Linear map of gradients to short vectors that keeps inner products (count sketch, Charikar et al. 2002).

    ``buckets`` and ``signs`` (P,) are the target and the sign of each element.
    """

    names: tuple[str, ...]
    buckets: Tensor
    signs: Tensor
    size: int

    @classmethod
    def of(cls, shapes: Tensors, rng: torch.Generator, size: int = SKETCH) -> "GradientSketch":
        """Build a sketch for gradients like ``shapes``; with at most ``size`` elements they are kept unchanged."""
        elements = sum(t.numel() for t in shapes.values())
        device = next(iter(shapes.values())).device
        if elements <= size:
            unchanged = torch.arange(elements, device=device), torch.ones(elements, device=device)
            return cls(tuple(shapes), *unchanged, elements)
        buckets = torch.randint(size, (elements,), generator=rng, device=rng.device)
        signs = 2.0 * torch.randint(2, (elements,), generator=rng, device=rng.device) - 1
        return cls(tuple(shapes), buckets.to(device), signs.to(device), size)

    def __call__(self, gradients: Tensors) -> Tensor:
        found = torch.zeros(len(next(iter(gradients.values()))), self.size, device=self.signs.device)
        for name, part in self._parts(gradients):
            values = gradients[name].reshape(len(gradients[name]), -1) * self.signs[part]
            found = found.index_add(1, self.buckets[part], values)
        return found

    def back(self, sketched: Tensor, like: Tensors) -> Tensors:
        """Apply the transpose: (size,) -> tensors shaped like ``like``."""
        parts = self._parts({name: value.unsqueeze(0) for name, value in like.items()})
        return {n: (sketched[self.buckets[p]] * self.signs[p]).reshape(like[n].shape) for n, p in parts}

    def _parts(self, gradients: Tensors) -> Sequence[tuple[str, slice]]:
        ends = accumulate((gradients[name][0].numel() for name in self.names), initial=0)
        return [(name, slice(*pair)) for name, pair in zip(self.names, pairwise(ends), strict=True)]


@dataclass(frozen=True, eq=False)
class GradientClassifier:
    """Map sketched gradients (B, F) to logits (B, A), by their direction alone.

    ``mean`` (F,) is of the training directions, ``basis`` (F, R) their span, scaled to unit variance.
    """

    mean: Tensor
    basis: Tensor
    head: nn.Module

    def __call__(self, sketched: Tensor) -> Tensor:
        logits: Tensor = self.head((_directions(sketched) - self.mean) @ self.basis)
        return logits

    @classmethod
    def fit(
        cls,
        sketched: Tensor,
        labels: Tensor,
        classes: int,
        rng: torch.Generator,
        *,
        hidden: int = 0,
        steps: int = STEPS,
    ) -> "GradientClassifier":
        """Train a classifier on sketched gradients (N, F) with ``labels`` (N,) in [0, classes) by cross entropy.

        ``hidden`` is the width of a hidden layer, 0 for a linear classifier; each of ``steps`` takes all examples.
        """
        directions = _directions(sketched).detach()
        mean = directions.mean(0)
        _, spread, right = torch.linalg.svd(directions - mean, full_matrices=False)
        rank = min(RANK, int((spread > 1e-5 * spread[0]).sum()))
        basis = right[:rank].T * (math.sqrt(len(directions)) / spread[0].clamp(min=1e-12))
        head = _head([rank, *([hidden] if hidden else []), classes], rng, directions.device)
        held = list(head.parameters())
        optimizer = torch.optim.Adam(held, lr=0.01, weight_decay=1e-3)
        inputs = (directions - mean) @ basis
        with torch.enable_grad():
            for _ in range(steps):
                loss = F.cross_entropy(head(inputs), labels)
                for parameter, slope in zip(held, torch.autograd.grad(loss, held), strict=True):
                    parameter.grad = slope
                optimizer.step()
        return cls(mean, basis, head.requires_grad_(False))


def _head(widths: Sequence[int], rng: torch.Generator, device: torch.device) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layer = nn.Linear(inner, outer, device="meta").to_empty(device=device)
        for parameter in layer.parameters():
            drawn = torch.rand(parameter.shape, generator=rng, device=rng.device).to(parameter)
            parameter.data.copy_((2 * drawn - 1) / math.sqrt(inner))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _directions(sketched: Tensor) -> Tensor:
    found: Tensor = sketched / torch.linalg.vector_norm(sketched, dim=1, keepdim=True).clamp(min=1e-12)
    return found
