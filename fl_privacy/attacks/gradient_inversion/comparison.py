"""All gradients of many victims against the observed ones in one operation, a part that fits the cache at a time.

The gradient of a linear layer's weight is a product over the positions of a text. Formed for all victims at once, every
square, sign and sum of it would go through memory, there and back. Here a few victims' gradients of one weight are
formed, compared and turned into slopes while they are in the cache, and are never written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fl_privacy.attacks.gradient_inversion.statistics import Target
from fl_privacy.types import Tensors

_IN_CACHE = 1 << 16
"""Elements of a gradient that are compared at a time."""

Coefficients = Mapping[str, tuple[float, float]]
"""Of each tensor, on its squared and on its absolute distance."""

Factored = Mapping[str, tuple[Tensor, Tensor]]
"""Of weights: output gradients (V, O, P) and inputs (V, D, P), whose product is the gradient."""


def weighted_distance(
    formed: Tensors, factored: Factored, targets: Mapping[str, Target], weights: Coefficients
) -> Tensor:
    """(V,) sum over the tensors of ``a ||g' - g||^2 + b sum |g' - g|``; it can be differentiated once.

    Args:
        formed: gradients (V, *shape) by name.
        factored: those of the other tensors, by their factors.
        targets: observed, without bounds.
        weights: a and b of each.
    """
    observed = [torch.cat([targets[name].value for name in formed], 1)] if formed else []
    joined = [torch.cat([gradient.reshape(len(gradient), -1) for gradient in formed.values()], 1)] if formed else []
    sizes = [targets[name].size for name in formed]
    plan = _Plan(
        elementwise=[_spread([weights[name][k] for name in formed], sizes, joined[0]) for k in (0, 1)]
        if formed
        else (),
        products=[weights[name] for name in factored],
        observed=[*observed, *(targets[name].value for name in factored)],
    )
    loss: Tensor = _Compare.apply(plan, *joined, *(part.mT for parts in factored.values() for part in parts))
    return loss


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is compared.

    Attributes:
        elementwise: (n,) a and b for each element of the gradients that were formed, which come as one.
        products: a and b of those that are products.
        observed: (V, n) of each.
    """

    elementwise: Sequence[Tensor]
    products: Sequence[tuple[float, float]]
    observed: Sequence[Tensor]


class _Compare(torch.autograd.Function):
    """(plan, formed gradients as one (V, n), deltas (V, P, O) and inputs (V, P, D) of the others) -> (V,)."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> Tensor:
        wanted, count = any(ctx.needs_input_grad), int(bool(plan.elementwise))
        loss, slopes = tensors[0].new_zeros(len(tensors[0])), []
        if plan.elementwise:
            squared, absolute = plan.elementwise
            apart = tensors[0] - plan.observed[0]
            slope = torch.sign(apart).mul_(absolute)
            loss += torch.linalg.vecdot(apart, torch.addcmul(slope, apart, squared))
            slopes.append(slope.addcmul_(apart, squared, value=2))
        parts = zip(tensors[count::2], tensors[count + 1 :: 2], strict=True)
        for weights, observed, (deltas, inputs) in zip(plan.products, plan.observed[count:], parts, strict=True):
            slopes += _products(loss, deltas, inputs, observed, weights, wanted=wanted)
        ctx.save_for_backward(*(slopes if wanted else ()))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (by_loss,) = upstream
        return None, *(by_loss.view(-1, *(1 for _ in slope.shape[1:])) * slope for slope in ctx.saved_tensors)


def _products(
    loss: Tensor, deltas: Tensor, inputs: Tensor, observed: Tensor, weights: tuple[float, float], *, wanted: bool
) -> list[Tensor]:
    """Add to ``loss`` (V,) what the products over P of ``deltas`` (V, P, O) and ``inputs`` (V, P, D) are apart from
    those observed; the slopes by both where they are ``wanted``."""
    squared, absolute = weights
    shape = (deltas.shape[2], inputs.shape[2])
    size = len(deltas) if deltas.is_cuda else max(1, _IN_CACHE // (shape[0] * shape[1]))
    slopes = [torch.empty_like(deltas), torch.empty_like(inputs)] if wanted else []
    apart, slope = (deltas.new_empty(min(size, len(deltas)), *shape) for _ in range(2))
    for start in range(0, len(deltas), size):
        few = slice(start, start + size)
        left, right, seen = deltas[few], inputs[few], observed[few].view(-1, *shape)
        apart, slope = apart[: len(left)], slope[: len(left)]
        torch.baddbmm(seen, left.mT, right, beta=-1, out=apart)
        loss[few].add_(torch.mul(apart, apart, out=slope).sum((1, 2)), alpha=squared)
        loss[few].add_(torch.abs(apart, out=slope).sum((1, 2)), alpha=absolute)
        if wanted:
            torch.sign(apart, out=slope).mul_(absolute).add_(apart, alpha=2 * squared)
            torch.bmm(right, slope.mT, out=slopes[0][few])
            torch.bmm(left, slope, out=slopes[1][few])
    return slopes


def _spread(weights: Sequence[float], sizes: Sequence[int], like: Tensor) -> Tensor:
    """(n,) each as often as its tensor has elements."""
    return torch.cat([like.new_full((size,), weight) for weight, size in zip(weights, sizes, strict=True)])
