"""Clip the guess as the client clipped its update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive.estimates import estimate_clip_norm, estimate_noise_std
from fl_privacy.effects import Scope
from fl_privacy.types import Tensors


@dataclass(frozen=True, eq=False)
class Clip:
    """Guessed gradients scaled down to norms (V,).

    Attributes:
        counted: (V, *shape) by name, 1 for elements that count for the norm, 0 for those dropped before the client
            clipped; missing names count as a whole.
    """

    norms: Tensor
    scope: Scope
    counted: Tensors = field(default_factory=dict)

    def __call__(self, gradients: Tensors) -> Tensors:
        """Clip gradients (V, *shape) by name."""
        tiny = torch.finfo(self.norms.dtype).tiny
        left = {name: g * self.counted[name] if name in self.counted else g for name, g in gradients.items()}
        squares = {name: g.flatten(1).square().sum(1) for name, g in left.items()}
        if self.scope == "global":
            squares = dict.fromkeys(squares, torch.stack(list(squares.values())).sum(0))
        factors = {name: (self.norms / (s + tiny).sqrt()).clamp_max(1) for name, s in squares.items()}
        return {name: g * factors[name].view(-1, *[1] * (g.dim() - 1)) for name, g in gradients.items()}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Clip":
        counted = {name: change(each) for name, each in self.counted.items()}
        return Clip(change(self.norms), self.scope, counted)


@dataclass(frozen=True, eq=False)
class Clips:
    """Several clips of guessed gradients, in the client's order."""

    parts: tuple[Clip, ...]

    def __call__(self, gradients: Tensors) -> Tensors:
        for clip in self.parts:
            gradients = clip(gradients)
        return gradients

    def map(self, change: Callable[[Tensor], Tensor]) -> "Clips":
        return Clips(tuple(clip.map(change) for clip in self.parts))


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """The clients' clipping, in the units of the tensors that are matched.

    Attributes:
        norm: largest norm; ``None``: estimated from the update.
        noise_std: standard deviation of the clients' noise; ``None``: estimated.
    """

    norm: float | None
    noise_std: float | None
    scope: Scope

    def of(self, matched: Sequence[Tensors], counted: Tensors) -> Clip:
        return Clip(torch.tensor([self._norm_of(update) for update in matched]), self.scope, counted)

    def _norm_of(self, matched: Tensors) -> float:
        if self.norm is not None:
            return self.norm
        std = estimate_noise_std(matched) if self.noise_std is None else self.noise_std
        return estimate_clip_norm(matched, std)
