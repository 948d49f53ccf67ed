"""Where the undefended update must have been, given the one observed."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive.estimates import estimate_step
from fl_privacy.effects import Quantized, Sparse
from fl_privacy.types import Tensors

Bounds = Mapping[str, tuple[Tensor, Tensor]]
"""Name -> least and largest value of each element; names that are missing were uploaded as they are."""

Rule = Callable[[Tensors], Bounds]
"""Update -> bounds."""


def where_shared(effect: Sparse) -> Rule:
    """Elements that are zero may have been anything; if the largest were kept, anything below the smallest of these."""

    def rule(update: Tensors) -> Bounds:
        limits = _limits(effect, update)
        bounds = {}
        for name, t in update.items():
            hidden = t == 0
            bounds[name] = t.masked_fill(hidden, -limits[name]), t.masked_fill(hidden, limits[name])
        return bounds

    return rule


def _limits(effect: Sparse, update: Tensors) -> dict[str, float]:
    """The largest magnitude that an element may have had that was set to zero."""
    if not effect.largest or effect.error_feedback or effect.noise_std:
        return dict.fromkeys(update, torch.inf)
    smallest = {name: float(kept.min()) if len(kept := t[t != 0].abs()) else torch.inf for name, t in update.items()}
    if effect.scope == "layer":
        return smallest
    return dict.fromkeys(update, min(smallest.values()))


def within_bins(effect: Quantized) -> Rule:
    """Elements may have been anything that rounds to what is observed."""
    stochastic = effect.rounding != "nearest"

    def rule(update: Tensors) -> Bounds:
        return {name: _bin(t, effect.bits, stochastic=stochastic) for name, t in update.items()}

    return rule


def _bin(tensor: Tensor, bits: int | None, *, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Least and largest value of each element, none beyond the largest magnitude, which the levels reach."""
    largest = tensor.abs().max()
    if bits == 1 and not stochastic:
        inf = torch.full_like(tensor, torch.inf)
        return torch.where(tensor < 0, -inf, 0.0), torch.where(tensor < 0, 0.0, inf)
    step = estimate_step(tensor) if bits is None else 2 * float(largest) / max(1, 2**bits - 2)
    reach = step if stochastic else step / 2
    return (tensor - reach).clamp_min(-largest), (tensor + reach).clamp_max(largest)


def shared_columns(weight: str) -> Rule:
    """Columns of ``weight`` that are zero may have been anything."""

    def rule(update: Tensors) -> Bounds:
        if weight not in update:
            return {}
        t = update[weight]
        hidden = (t == 0).all(0).expand_as(t)
        return {weight: (t.masked_fill(hidden, -torch.inf), t.masked_fill(hidden, torch.inf))}

    return rule


def only_layer(layer: str) -> Rule:
    """All tensors but those of ``layer`` may have been anything."""

    def rule(update: Tensors) -> Bounds:
        return {
            name: (torch.full_like(t, -torch.inf), torch.full_like(t, torch.inf))
            for name, t in update.items()
            if name.rpartition(".")[0] != layer
        }

    return rule


def widest(bounds: Iterable[Bounds]) -> Bounds:
    """What all of ``bounds`` allow together: the least low and the largest high."""
    result: dict[str, tuple[Tensor, Tensor]] = {}
    for one in bounds:
        for name, (low, high) in one.items():
            before = result.get(name, (low, high))
            result[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)
    return result
