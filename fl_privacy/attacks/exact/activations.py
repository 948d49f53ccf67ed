"""Elementwise activations that grow: told apart by what they make of numbers, inverted, differentiated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SILENT = 1e-5
"""Outputs of a ReLU up to this share of the largest are zero."""

_NOISE = 2.0
"""Outputs of a ReLU up to so many times the depth of the least one are silent."""

_ALIKE = 1e-6

_FARTHEST = 8.0
"""From 0, of numbers by which activations are told apart; beyond it they no longer differ from a line."""


@dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise function that grows.

    Attributes:
        value: z -> a.
        inverse: a -> z; of a ReLU where it is not silent.
        slope: a -> da/dz.
    """

    value: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _leaky(slope: float) -> Activation:
    return Activation(
        lambda z: torch.where(z > 0, z, slope * z),
        lambda a: torch.where(a > 0, a, a / slope),
        lambda a: torch.where(a > 0, torch.ones_like(a), slope),
    )


def _above_noise(a: Tensor) -> Tensor:
    """Outputs of a ReLU, where those are 0 that noise makes of silent ones: what is below 0 says how much there is."""
    least = a.flatten(1).amin(1).clamp(max=0).view(-1, *(1 for _ in a.shape[1:]))
    return torch.where(a > -_NOISE * least, a, 0)


def _above_silence(a: Tensor) -> Tensor:
    largest = a.flatten(1).amax(1).view(-1, *(1 for _ in a.shape[1:]))
    return (a > _SILENT * largest).to(a)


_EDGE = 1e-12
_SCALE, _DEPTH = 1.0507009873554805, 1.0507009873554805 * 1.6732632423543772
"""Slope of SELU above 0, and how far below 0 it goes (Klambauer et al. 2017, eq. 2)."""

ACTIVATIONS: Sequence[Activation] = (
    Activation(torch.clone, torch.clone, torch.ones_like),
    Activation(torch.relu, _above_noise, _above_silence),
    Activation(torch.sigmoid, lambda a: torch.logit(a, _EDGE), lambda a: a * (1 - a)),
    Activation(torch.tanh, lambda a: torch.atanh(a.clamp(_EDGE - 1, 1 - _EDGE)), lambda a: 1 - a.square()),
    Activation(
        nn.functional.elu,
        lambda a: torch.where(a > 0, a, torch.log1p(a.clamp(_EDGE - 1, 0))),
        lambda a: torch.where(a > 0, 1, 1 + a),
    ),
    Activation(
        nn.functional.softplus,
        lambda a: a + torch.log(-torch.expm1(-a.clamp_min(_EDGE))),
        lambda a: -torch.expm1(-a),
    ),
    Activation(
        nn.functional.selu,
        lambda a: torch.where(a > 0, a / _SCALE, torch.log1p((a / _DEPTH).clamp(_EDGE - 1, 0))),
        lambda a: torch.where(a > 0, _SCALE, a + _DEPTH),
    ),
    _leaky(0.01),
)
"""Those that are told apart by what comes out of them, beside a leaky ReLU of any slope."""


def telling(output: Tensor, rng: torch.Generator) -> Tensor:
    """Numbers by which activations are told apart in place of an ``output``: of both signs, small and large."""
    numbers = torch.linspace(-_FARTHEST, _FARTHEST, output.numel(), dtype=output.dtype)
    return numbers[torch.randperm(output.numel(), generator=rng)].view(output.shape).to(output.device)


def activation_between(output: Tensor, after: Tensor) -> Activation | None:
    """The activation that makes ``after`` of an ``output``; ``None`` where it is another, or more than that."""
    if output.shape[0] != after.shape[0] or output.numel() != after.numel():
        return None
    lowest = output.flatten().argmin()
    slope = float(after.flatten()[lowest] / output.flatten()[lowest])
    for activation in (*ACTIVATIONS, *([_leaky(slope)] if 0 < slope < 1 else [])):
        if torch.allclose(activation.value(output).flatten(1), after.flatten(1), rtol=_ALIKE, atol=_ALIKE):
            return activation
    return None
