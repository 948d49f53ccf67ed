"""Functions with closed-form derivatives in few passes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def angular_distance(
    guesses: Sequence[Tensor], observed: Sequence[Tensor], length: Tensor, observed_length: Tensor, elsewhere: Tensor
) -> Tensor:
    """Return half the squared distance (V,) of two unit vectors, 1 minus their cosine, with all digits down to zero.

    The derivative by the guesses includes the change of length.

    Args:
        guesses, observed: parts (V, n) of the vectors, of any n.
        length, observed_length: lengths (V,) of the whole vectors.
        elsewhere: squared distance (V,) of the other parts.
    """
    found: Tensor = _AngularDistance.apply(length, observed_length, elsewhere, len(guesses), *guesses, *observed)
    return found


class _AngularDistance(torch.autograd.Function):
    """For q = g - |g| o / |o| of each part, the distance is D = |q|^2 / 2 |g|^2, with dD/dg = (q - D g) / |g|^2."""

    @staticmethod
    def forward(
        ctx: Any, length: Tensor, observed_length: Tensor, elsewhere: Tensor, count: int, *parts: Tensor
    ) -> Tensor:
        guesses, observed = parts[:count], parts[count:]
        scale = (-length / observed_length)[:, None]
        apart = [(o * scale).add_(g) for g, o in zip(guesses, observed, strict=True)]
        squared = sum((_squared_length(part) for part in apart), torch.zeros_like(length))
        distance = (squared / length.square() + elsewhere) / 2
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


def squared_distance(one: Tensor, other: Tensor) -> Tensor:
    """Return ||one - other||^2 (V,) of (V, n), with a derivative by ``one`` only."""
    found: Tensor = _SquaredDistance.apply(one, other)
    return found


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
        found: Tensor = apart * (2 * slopes[0])[:, None]
        return found, None


def _squared_length(values: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(values, dim=1)
    return lengths.square()


def absolute_differences(images: Tensor) -> Tensor:
    """Return the mean absolute difference (V,) of horizontal neighbors plus that of vertical ones."""
    found: Tensor = _AbsoluteDifferences.apply(images)
    return found


class _AbsoluteDifferences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        across = images[..., :, 1:] - images[..., :, :-1]
        down = images[..., 1:, :] - images[..., :-1, :]
        numbers = [max(1, d[0].numel()) for d in (across, down)]
        means = [
            torch.linalg.vector_norm(d.flatten(1), 1, dim=1) / n for d, n in zip((across, down), numbers, strict=True)
        ]
        ctx.save_for_backward(across.sign_().div_(numbers[0]), down.sign_().div_(numbers[1]))
        found: Tensor = means[0] + means[1]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        across, down = ctx.saved_tensors
        pad = torch.nn.functional.pad
        found: Tensor = pad(across, (1, 0)) - pad(across, (0, 1))
        found = found.add_(pad(down, (0, 0, 1, 0))).sub_(pad(down, (0, 0, 0, 1)))
        found *= slopes[0].reshape(-1, *(1 for _ in found.shape[1:]))
        return found
