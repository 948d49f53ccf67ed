"""Statistics of each layer and victim from which objectives are computed, with closed-form derivatives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fl_privacy.models.gradients.layered import Factors
from fl_privacy.types import Tensors


class AngularDistance(torch.autograd.Function):
    """Function for 1 - cosine (V,) between V victims' guessed and observed gradients, exact near zero.

    It is half the squared distance of the unit vectors.

    Args:
        length, observed_length: lengths (V,) of the whole gradients.
        elsewhere: squared distance (V,) of the unit vectors over all tensors that are not among ``parts``.
        count: number of guessed tensors in ``parts``.
        parts: flattened tensors (V, n), of any n: first the guessed, then the observed ones.
    """

    @staticmethod
    def forward(
        ctx: Any, length: Tensor, observed_length: Tensor, elsewhere: Tensor, count: int, *parts: Tensor
    ) -> Tensor:
        guesses, observed = parts[:count], parts[count:]
        scale = (-length / observed_length)[:, None]
        apart = [(o * scale).add_(g) for g, o in zip(guesses, observed, strict=True)]
        squared = sum((_squared_length(part) for part in apart), torch.zeros_like(length))
        distance = (squared / length.square() + elsewhere) / 2
        # for q = g - |g| o / |o|, distance D = |q|^2 / (2 |g|^2), and its derivative is (q - D g) / |g|^2
        ctx.save_for_backward(length, distance, *guesses, *apart)
        return distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        length, distance, *saved = ctx.saved_tensors
        factor = (slopes[0] / length.square())[:, None]
        along = -factor * distance[:, None]
        guesses, apart = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        found = [(g * along).add_(q * factor) for g, q in zip(guesses, apart, strict=True)]
        return None, None, None, None, *found, *(None for _ in apart)


class _SquaredDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        apart = one - other
        ctx.save_for_backward(apart)
        return _squared_length(apart)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (apart,) = ctx.saved_tensors
        return apart * (2 * slopes[0])[:, None], None


def _squared_length(values: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(values, dim=1)
    return lengths.square()


class AbsoluteDifferences(torch.autograd.Function):
    """Function for the mean absolute difference of horizontal plus that of vertical neighbors in V images, (V,)."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        across = images[..., :, 1:] - images[..., :, :-1]
        down = images[..., 1:, :] - images[..., :-1, :]
        numbers = [max(1, d[0].numel()) for d in (across, down)]
        means = [
            torch.linalg.vector_norm(d.flatten(1), 1, dim=1) / n for d, n in zip((across, down), numbers, strict=True)
        ]
        ctx.save_for_backward(across.sign_().div_(numbers[0]), down.sign_().div_(numbers[1]))
        return cast(Tensor, means[0] + means[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        across, down = ctx.saved_tensors
        pad = torch.nn.functional.pad
        found: Tensor = pad(across, (1, 0)) - pad(across, (0, 1))
        found = found.add_(pad(down, (0, 0, 1, 0))).sub_(pad(down, (0, 0, 0, 1)))
        found *= slopes[0].reshape(-1, *(1 for _ in found.shape[1:]))
        return found


@dataclass(frozen=True, eq=False)
class Target:
    """The observed gradient of one tensor for V victims."""

    value: Tensor  # (V, n) flattened; (V, 0) if it is known by its factors
    squared: Tensor  # (V,) sum of squares
    variance: Tensor  # (V,) of the n elements
    mean: Tensor  # (V,)
    size: int
    low: Tensor | None = None  # lower bounds (V, n) of a value that a defense hid; a guess within has no error
    high: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor, bounds: tuple[Tensor, Tensor] | None = None) -> "Target":
        flat = value.reshape(len(value), -1)
        low, high = (None, None) if bounds is None else (bound.reshape(len(bound), -1) for bound in bounds)
        return cls(flat, flat.square().sum(1), flat.var(1, correction=0), flat.mean(1), flat.shape[1], low, high)

    @classmethod
    def joined(cls, targets: Sequence["Target"]) -> "Target":
        return cls.of(torch.cat([target.value for target in targets], 1))

    def without_value(self) -> "Target":
        return Target(self.value[:, :0].clone(), self.squared, self.variance, self.mean, self.size)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Target":
        low, high = (None if bound is None else change(bound) for bound in (self.low, self.high))
        value, squared, variance, mean = map(change, (self.value, self.squared, self.variance, self.mean))
        return Target(value, squared, variance, mean, self.size, low, high)


@dataclass(frozen=True, eq=False)
class Explicit:
    """Norms and distances (``LayerStatistics``) of a guessed gradient, held as one tensor (V, *shape).

    If the target has bounds, the guess is compared with the nearest value within them.
    """

    gradient: Tensor
    target: Target

    @property
    def guess(self) -> Tensor | None:
        return self.gradient.reshape(len(self.gradient), -1) if self.target.low is None else None

    @property
    def squared(self) -> Tensor:
        return _squared_length(self._guess)

    def apart(self, scale: Tensor, observed_scale: Tensor) -> Tensor:
        return torch.addcmul(-observed_scale[:, None] * self.target.value, self._guess, scale[:, None]).square().sum(1)

    @property
    def distance(self) -> Tensor:
        if self.target.low is None:
            found: Tensor = _SquaredDistance.apply(self.gradient.reshape(len(self.gradient), -1), self.target.value)
            return found
        return self.difference.square().sum(1)

    @property
    def absolute(self) -> Tensor:
        return self.difference.abs().sum(1)

    @property
    def _guess(self) -> Tensor:
        return self.target.value + self.difference if self.guess is None else self.guess

    @property
    def difference(self) -> Tensor:
        flat, target = self.gradient.reshape(len(self.gradient), -1), self.target
        return flat - (target.value if target.low is None else flat.clamp(target.low, target.high))


@dataclass(frozen=True, eq=False)
class Products:
    """Norms and distances (``LayerStatistics``) of V guessed weight gradients, each a product of two factors.

    The factors are ``deltas`` (V, M, P), gradients at the M outputs, and ``inputs`` (V, N, P), at P places of a layer.
    """

    deltas: Tensor
    inputs: Tensor
    factors: Factors
    target: Target
    guess: None = None

    @property
    def squared(self) -> Tensor:
        return self._along.square().sum((1, 2)) + self._outside

    def apart(self, scale: Tensor, observed_scale: Tensor) -> Tensor:
        along = scale[:, None, None] * self._along - observed_scale[:, None, None] * self.factors.core
        return along.square().sum((1, 2)) + scale.square() * self._outside

    @property
    def distance(self) -> Tensor:
        return (self._along - self.factors.core).square().sum((1, 2)) + self._outside

    @property
    def absolute(self) -> Tensor:
        return self._formed.abs().sum((1, 2))

    @property
    def difference(self) -> Tensor:
        return self._formed.flatten(1)

    @property
    def _formed(self) -> Tensor:
        return self.deltas @ self.inputs.mT - self.factors.left @ self.factors.core @ self.factors.right.mT

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *_parts(self.deltas, self.factors.left), *_parts(self.inputs, self.factors.right)

    @cached_property
    def _along(self) -> Tensor:
        along, _, input_along, _ = self._split
        return along @ input_along.mT

    @cached_property
    def _outside(self) -> Tensor:
        """Return the squared norm (V,) of the guess's part orthogonal to the observed gradient's factors."""
        along, rest, input_along, input_rest = self._split
        input_rest_products = input_rest.mT @ input_rest
        input_products = input_along.mT @ input_along + input_rest_products
        return ((along.mT @ along) * input_rest_products + (rest.mT @ rest) * input_products).sum((1, 2))


@dataclass(frozen=True, eq=False)
class Zero:
    """Norms and distances (``LayerStatistics``) of an all-zero guess."""

    target: Target
    guess: None = None

    @property
    def squared(self) -> Tensor:
        return torch.zeros_like(self.target.squared)

    def apart(self, scale: Tensor, observed_scale: Tensor) -> Tensor:
        return observed_scale.square() * self.target.squared

    @property
    def distance(self) -> Tensor:
        return self.target.squared

    @property
    def absolute(self) -> Tensor:
        return self.target.value.abs().sum(1)

    @property
    def difference(self) -> Tensor:
        return -self.target.value


LayerStatistics = Explicit | Products | Zero
"""Statistics of the guessed gradient g' against the observed g of one tensor, V victims each.

``guess`` is g' (V, n) if it is formed and without bounds, else ``None``; ``squared`` is ||g'||^2, ``distance`` ||g' -
g||^2, and ``absolute`` the sum of |g' - g|, (V,). ``difference`` is g' - g (V, n), for ``elementwise`` objectives.
``apart`` is ||scale g' - observed_scale g||^2 for factors (V,), as exact as squared differences.
"""


def _parts(values: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    along = directions.mT @ values
    return along, torch.baddbmm(values, directions, along, alpha=-1)


_IN_CACHE = 1 << 16  # elements of a gradient that are compared at a time
Coefficients = Mapping[str, tuple[float, float]]  # weights of each tensor's squared and absolute distance


def weighted_distance(
    formed: Tensors, factored: Mapping[str, tuple[Tensor, Tensor]], targets: Mapping[str, Target], weights: Coefficients
) -> Tensor:
    """Return each victim's sum (V,) over tensors of ``a ||g' - g||^2 + b sum |g' - g|``; it can be differentiated once.

    ``formed``: guessed gradients g' (V, *shape). ``factored``: for the other tensors, two factors whose product is g':
    the gradient at the layer's output, and its input. ``targets``: observed gradients g, which are exact values, not
    bounds. ``weights``: (a, b) by tensor.
    """
    observed = [torch.cat([targets[name].value for name in formed], 1)] if formed else []
    joined = [torch.cat([gradient.reshape(len(gradient), -1) for gradient in formed.values()], 1)] if formed else []
    spread = [[joined[0].new_full((targets[name].size,), weights[name][k]) for name in formed] for k in (0, 1)]
    elementwise = [torch.cat(each) for each in spread] if formed else []
    products = [weights[name] for name in factored]
    observed += (targets[name].value for name in factored)
    factors = (part.mT for parts in factored.values() for part in parts)
    return cast(Tensor, _Compare.apply(elementwise, products, observed, *joined, *factors))


class _Compare(torch.autograd.Function):
    """Differentiable function that computes :func:`weighted_distance` for joined and factored gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        elementwise: Sequence[Tensor],
        products: Sequence[tuple[float, float]],
        observed: Sequence[Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        wanted, count = any(ctx.needs_input_grad), int(bool(elementwise))
        loss, slopes = tensors[0].new_zeros(len(tensors[0])), []
        if elementwise:
            squared, absolute = elementwise
            apart = tensors[0] - observed[0]
            slope = torch.sign(apart).mul_(absolute)
            loss += torch.linalg.vecdot(apart, torch.addcmul(slope, apart, squared))
            slopes.append(slope.addcmul_(apart, squared, value=2))
        parts = zip(tensors[count::2], tensors[count + 1 :: 2], strict=True)
        for weights, own, (deltas, inputs) in zip(products, observed[count:], parts, strict=True):
            slopes += _add_distances(loss, deltas, inputs, own, weights, wanted=wanted)
        ctx.save_for_backward(*(slopes if wanted else ()))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = (upstream[0].view(-1, *(1 for _ in slope.shape[1:])) * slope for slope in ctx.saved_tensors)
        return None, None, None, *found


def _add_distances(
    loss: Tensor, deltas: Tensor, inputs: Tensor, observed: Tensor, weights: tuple[float, float], *, wanted: bool
) -> list[Tensor]:
    """Add to ``loss`` (V,) weighted distances of ``deltas``^T ``inputs`` from ``observed``.

    ``weights``: of the squared and the absolute distance. ``wanted``: return the gradients of both factors.
    """
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
