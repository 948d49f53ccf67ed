"""Gradients as short vectors, and classifiers of these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.types import Tensors

RANK, STEPS = 256, 200
"""Coordinates that a classifier looks at, and steps of its training."""

SKETCH = 4096
"""Numbers that a gradient is told by: inner products of gradients are kept to about 2 %."""


@dataclass(frozen=True, eq=False)
class GradientSketch:
    """A linear map of gradients to short vectors that keeps inner products (count sketch, Charikar et al. 2002).

    Attributes:
        names: of the parameters, in order.
        buckets: (P,) where each element goes.
        signs: (P,) and by which sign.
        size: length of the result.
    """

    names: tuple[str, ...]
    buckets: Tensor
    signs: Tensor
    size: int

    @classmethod
    def of(cls, shapes: Tensors, rng: torch.Generator, size: int = SKETCH) -> "GradientSketch":
        """Build a sketch for gradients like ``shapes``; with fewer elements than ``size`` they are kept unchanged."""
        elements = sum(t.numel() for t in shapes.values())
        device = next(iter(shapes.values())).device
        if elements <= size:
            return cls(
                tuple(shapes), torch.arange(elements, device=device), torch.ones(elements, device=device), elements
            )
        buckets = torch.randint(size, (elements,), generator=rng, device=rng.device)
        signs = 2.0 * torch.randint(2, (elements,), generator=rng, device=rng.device) - 1
        return cls(tuple(shapes), buckets.to(device), signs.to(device), size)

    def __call__(self, gradients: Tensors) -> Tensor:
        """Sketch gradients (B, *shape) each as (B, size); a name that is missing counts as zero."""
        batch = len(next(iter(gradients.values())))
        found = torch.zeros(batch, self.size, device=self.signs.device)
        for name, part in self._parts(gradients):
            values = gradients[name].reshape(len(gradients[name]), -1) * self.signs[part]
            found = found.index_add(1, self.buckets[part], values)
        return found

    def back(self, sketched: Tensor, like: Tensors) -> Tensors:
        """Apply the transpose: (size,) -> tensors shaped as ``like``, the derivative by the gradient."""
        return {
            name: (sketched[self.buckets[part]] * self.signs[part]).reshape(like[name].shape)
            for name, part in self._parts({n: t.unsqueeze(0) for n, t in like.items()})
        }

    def _parts(self, gradients: Tensors) -> Sequence[tuple[str, slice]]:
        parts, start = [], 0
        for name in self.names:
            size = gradients[name][0].numel()
            parts.append((name, slice(start, start + size)))
            start += size
        return parts


@dataclass(frozen=True, eq=False)
class GradientClassifier:
    """(B, F) sketched gradients -> (B, A) logits; only the direction of a gradient counts.

    Attributes:
        mean: (F,) of the directions that it was trained on.
        basis: (F, R) of what these span, scaled to unit variance.
        head: on the coordinates.
    """

    mean: Tensor
    basis: Tensor
    head: nn.Module

    def __call__(self, sketched: Tensor) -> Tensor:
        """Return the logits of ``sketched``, differentiable by the input."""
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
        """Train a classifier on sketched gradients (N, F) of examples with ``labels`` (N,) by cross entropy.

        Args:
            sketched: of the examples.
            labels: in [0, classes).
            classes: A.
            rng: of the first values.
            hidden: width of a hidden layer; 0 is a linear classifier.
            steps: of its training, each on all examples.
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
