"""Constraints on the guesses of an attacker that knows the defense: bounds, clipping and transforms."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller

import torch
from torch import Tensor, nn

from fl_privacy.data.transformations import Policy, Table, apply_policy
from fl_privacy.effects import NoisedLayers, Quantized, Scope, Sparse, Truncated
from fl_privacy.types import Tensors


@dataclass(frozen=True, eq=False)
class Clip:
    """Callable that clips V victims' guessed gradients (V, *shape), by name, to ``norms`` (V,), as a client does.

    ``scope``: one norm for all tensors, or one for each. ``counted``: (V, *shape) by name, 1 for elements that count
    for the norm, 0 for those dropped before the client clipped; all elements count of a tensor whose name is missing.
    """

    norms: Tensor
    scope: Scope
    counted: Tensors = field(default_factory=dict)

    def __call__(self, gradients: Tensors) -> Tensors:
        tiny = torch.finfo(self.norms.dtype).tiny
        left = {name: g * self.counted[name] if name in self.counted else g for name, g in gradients.items()}
        squares = {name: g.flatten(1).square().sum(1) for name, g in left.items()}
        if self.scope == "global":
            squares = dict.fromkeys(squares, torch.stack(list(squares.values())).sum(0))
        factors = {name: (self.norms / (s + tiny).sqrt()).clamp_max(1) for name, s in squares.items()}
        return {name: g * factors[name].view(-1, *[1] * (g.dim() - 1)) for name, g in gradients.items()}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Clip":
        return Clip(change(self.norms), self.scope, {name: change(each) for name, each in self.counted.items()})


@dataclass(frozen=True, eq=False)
class Clips:
    """Callable that applies several norm clippings to guessed gradients, in the client's order."""

    parts: tuple[Clip, ...]

    def __call__(self, gradients: Tensors) -> Tensors:
        for clip in self.parts:
            gradients = clip(gradients)
        return gradients

    def map(self, change: Callable[[Tensor], Tensor]) -> "Clips":
        return Clips(tuple(clip.map(change) for clip in self.parts))


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """The clients' clipping, rescaled to tensors that the attack compares, such as gradients instead of changes."""

    norm: float | None  # largest norm; ``None``: estimated from the update
    noise_std: float | None  # standard deviation of the clients' noise; ``None``: estimated
    scope: Scope

    def of(self, matched: Sequence[Tensors], counted: Tensors) -> Clip:
        norms = [self.norm or 0.0] * len(matched)
        if self.norm is None:
            stds = [estimate_noise_std(one) if self.noise_std is None else self.noise_std for one in matched]
            norms = [estimate_clip_norm(one, std) for one, std in zip(matched, stds, strict=True)]
        return Clip(torch.tensor(norms), self.scope, counted)


Bounds = Mapping[str, tuple[Tensor, Tensor]]
"""Parameter name -> lower and upper bound of each element; tensors without an entry are known exactly."""

Rule = Callable[[Tensors, float], Bounds]
"""Function of an update and its noise's standard deviation that returns bounds; where noise hides the defense's effect,
both bounds are the observed value.
"""

_THRESHOLD = 3.0  # multiple of the noise's standard deviation below which the smallest shared magnitude may be noise


def where_shared(effect: Sparse, update: Tensors, noise_std: float) -> Bounds:
    """Return bounds of the elements that a client dropped: plus and minus the smallest magnitude that it kept.

    The bounds are infinite if the kept elements are not known to be the largest. ``effect``: the client's
    sparsification. If noise hides which elements were dropped, observed values are exact.
    """
    bounds = {}
    for layers in [[name] for name in update] if effect.scope == "layer" else [list(update)]:
        part = {name: update[name] for name in layers}
        least, limit = _hidden(effect, torch.cat([t.flatten() for t in part.values()]), noise_std)
        for name, t in part.items():
            hidden = t.abs() <= least
            bounds[name] = t.masked_fill(hidden, -limit), t.masked_fill(hidden, limit)
    return bounds


AT_BOUND = 1e-4
"""Elements within this relative distance of the largest magnitude count as truncated, as weights round the update."""


def beyond_cut(effect: Truncated, update: Tensors, noise_std: float) -> Bounds:
    """Return bounds for elements that a client truncated: any value at or beyond the observed one; others are exact."""
    bound = effect.bound or max(float(t.abs().max()) for t in update.values())
    bounds = {}
    for name, t in update.items():
        cut = t.abs() >= (1 - AT_BOUND) * bound
        bounds[name] = t.masked_fill(cut & (t < 0), -torch.inf), t.masked_fill(cut & (t > 0), torch.inf)
    return bounds


def _hidden(effect: Sparse, values: Tensor, noise_std: float) -> tuple[float, float]:
    """Return the largest observed magnitude of ``values`` (n,) that a client dropped, and a bound on their true ones.

    (-1, 0) if noise is too large to distinguish dropped elements from kept ones.
    """
    sizes = values.abs()
    dropped = int((effect.dropped or 0.0) * len(sizes) + 1e-6)
    least = float(sizes.kthvalue(dropped).values) if dropped else 0.0
    kept = sizes[sizes > least]
    bounded = effect.largest and not (effect.error_feedback or effect.noise_std)
    limit = float(kept.min()) if bounded and len(kept) else torch.inf
    drowned = limit <= _THRESHOLD * noise_std
    if not (bounded and len(kept)):
        drowned = _drowned(sizes, dropped / len(sizes), noise_std)
    return (-1.0, 0.0) if drowned else (least, limit)


def _drowned(values: Tensor, dropped: float, noise_std: float) -> bool:
    return noise_std > 0 and float(values.square().mean()) <= (2 - dropped) * noise_std**2


def within_bins(effect: Quantized, update: Tensors, noise_std: float) -> Bounds:
    """Return bounds of quantized elements: their bins, or if noise exceeds these, the observed levels on both sides."""
    bins = {name: _bin(t, effect.bits, stochastic=effect.rounding != "nearest") for name, t in update.items()}
    rounded = sum(float((high - low).square().sum()) / 12 for low, high in bins.values())
    drowned = rounded <= noise_std**2 * sum(t.numel() for t in update.values())
    return {name: (t, t) for name, t in update.items()} if drowned else bins


def _bin(tensor: Tensor, bits: int | None, *, stochastic: bool) -> tuple[Tensor, Tensor]:
    largest = tensor.abs().max()
    if bits == 1 and not stochastic:
        inf = torch.full_like(tensor, torch.inf)
        return torch.where(tensor < 0, -inf, 0.0), torch.where(tensor < 0, 0.0, inf)
    step = estimate_step(tensor) if bits is None else 2 * float(largest) / max(1, 2**bits - 2)
    reach = step if stochastic else step / 2
    return (tensor - reach).clamp_min(-largest), (tensor + reach).clamp_max(largest)


def shared_columns(weight: str, dropped: float | None, update: Tensors, noise_std: float) -> Bounds:
    """Return bounds of the gradient of ``weight``: infinite in columns that Soteria zeroed, observed values in others.

    ``dropped``: share of zeroed columns, those of least norm; ``None``: all that are zero. If noise hides these
    columns, observed values are the bounds everywhere.
    """
    if weight not in update:
        return {}
    t = update[weight]
    if _drowned(t, dropped or 0.0, noise_std):
        return {weight: (t, t)}
    sizes = torch.linalg.vector_norm(t, dim=0)
    muted = int((dropped or 0.0) * len(sizes) + 1e-6)
    hidden = (sizes <= (sizes.kthvalue(muted).values if muted else 0.0)).expand_as(t)
    return {weight: (t.masked_fill(hidden, -torch.inf), t.masked_fill(hidden, torch.inf))}


def only_layer(layer: str, update: Tensors, noise_std: float) -> Bounds:
    """Return infinite bounds, which exclude tensors from comparison, for all tensors but those of ``layer``."""
    others = {name: torch.full_like(t, torch.inf) for name, t in update.items() if name.rpartition(".")[0] != layer}
    return {name: (-most, most) for name, most in others.items()}


def bare_layers(effect: NoisedLayers, reach: float, update: Tensors, noise_std: float) -> Bounds:
    """Return bounds of noised layers, ``reach`` from observed values; others, or all if none is bare, are exact."""
    noised = effect.noised(update)
    if len(noised) == len(update):
        return {}
    return {name: (update[name] - reach, update[name] + reach) for name in update if name in noised}


def widest(bounds: Iterable[Bounds]) -> Bounds:
    """Return the lowest lower and the highest upper bound of each element over several ``bounds``."""
    result: dict[str, tuple[Tensor, Tensor]] = {}
    for one in bounds:
        for name, (low, high) in one.items():
            before = result.get(name, (low, high))
            result[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)
    return result


def all_known(bounds: Bounds) -> bool:
    """Return whether the bounds fix every value."""
    return all(torch.equal(low, high) for low, high in bounds.values())


Transform = Callable[[Tensor], Tensor]  # (N, C, H, W) -> the same, differentiable


@dataclass(frozen=True, eq=False)
class AssumedTransform:
    """Callable that transforms each guessed image by one of ``transforms``; ``chosen``: their indices."""

    transforms: Sequence[Transform]
    chosen: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        flat, chosen = images.flatten(0, 1), self.chosen.flatten()
        rows = [(chosen == number).nonzero().flatten() for number in range(len(self.transforms))]
        changed = [transform(flat[some]) for transform, some in zip(self.transforms, rows, strict=True) if len(some)]
        return torch.cat(changed)[torch.cat(rows).argsort()].reshape(images.shape)

    def map(self, change: Callable[[Tensor], Tensor]) -> "AssumedTransform":
        return AssumedTransform(self.transforms, change(self.chosen))


def choose_transforms(number: int, restart: int, size: int, generator: torch.Generator) -> Tensor:
    """Choose one of ``number`` transforms for each image of a batch of ``size``; return the indices (B,).

    A single image gets transform number ``restart``, modulo ``number``; several images draw theirs at random.
    """
    return torch.tensor([restart % number]) if size == 1 else torch.randint(number, (size,), generator=generator)


def outcomes(policies: Sequence[str], *, table: Table = "paper", by_probability: bool = False) -> tuple[Transform, ...]:
    """List all image transforms that augmentation ``policies`` can result in.

    A policy such as ``3-43-15`` lists indices of operations in ``table``. Signed operations occur with both signs; if
    ``by_probability``, each operation may also be skipped.
    """
    found: dict[tuple[Policy, tuple[int, ...]], None] = {}
    for policy in (Policy.parse(name, table) for name in policies):
        parts = [part for n in range(len(policy.indices) + 1) for part in itertools.combinations(policy.indices, n)]
        for one in [Policy(part, table) for part in parts] if by_probability else [policy]:
            signs = [(1, -1) if operation.signed else (1,) for operation in one.operations]
            found |= dict.fromkeys((one, combination) for combination in itertools.product(*signs))
    return tuple(partial(apply_policy, policy=policy, signs=signs) for policy, signs in found)


_NORMAL = 0.6744897501960817  # median of |z| of a standard normal z
_FEWEST = 64  # least number of elements for which a median estimates a spread


def estimate_noise_std(update: Tensors) -> float:
    """Estimate the noise's standard deviation from the tensor with the least median magnitude.

    The tensor is assumed to hold mostly noise; anything else makes the estimate too large.
    """
    large = [t for t in update.values() if t.numel() >= _FEWEST] or list(update.values())
    return min(float(t.abs().median()) for t in large) / _NORMAL


def estimate_clip_norm(update: Tensors, noise_std: float) -> float:
    """Estimate the clipping norm: the root of an update's squared norm minus n ``noise_std``^2, for n elements."""
    squared = float(torch.stack([t.double().square().sum() for t in update.values()]).sum())
    return math.sqrt(max(squared - sum(t.numel() for t in update.values()) * noise_std**2, 1e-4 * squared))


def estimate_step(tensor: Tensor) -> float:
    """Estimate the spacing of a quantized tensor's levels: the least difference of two values; 0 for one level."""
    levels = torch.unique(tensor.double())
    return float(levels.diff().min()) if len(levels) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class HiddenGradient:
    """Unknown gradient of a client's private loss with respect to the features.

    ``strength``: expected size of a feature's gradient, above 0, if the other loss, cross entropy, has factor 1 and the
    private head's weights have root mean square r = 1. Otherwise, it is ``strength`` r^``layers``.
    """

    weight: str  # name of the weight of the linear layer that the features enter
    strength: float
    weight_rms: float | None  # root mean square of the private head's weights; ``None`` for the layer's own
    layers: int = 1  # number of layers of the private head

    def unknowns(self, weight: Tensor) -> "Unknowns":
        rms = self.weight_rms or float(weight.square().mean().sqrt())
        return Unknowns(weight.shape[1], self.strength * rms**self.layers)


@dataclass(frozen=True)
class Unknowns:
    """Number and unit of the variables with which an attack guesses a :class:`HiddenGradient`."""

    features: int  # number of variables for each example and round
    unit: float  # gradient that a variable of 1 stands for


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateConstraints:
    """Bounds and clipping that are known of V victims' updates in one round; ``clip`` is ``None`` without clipping."""

    bounds: Bounds  # (V, *shape) each, of the tensors that are not known exactly
    clip: Clips | None

    def to(self, device: torch.device, dtype: torch.dtype) -> "UpdateConstraints":
        move = methodcaller("to", device=device, dtype=dtype)
        bounds = {name: (move(low), move(high)) for name, (low, high) in self.bounds.items()}
        return UpdateConstraints(bounds=bounds, clip=self.clip and self.clip.map(move))


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownFeatures:
    """Prior that compares guesses' features with the true ones of V victims, known exactly from a layer's gradient."""

    front: nn.Module  # images (B, C, H, W) -> (B, F)
    values: Tensor  # (V, B, F); zeros if not known
    weight: Tensor  # (V,) weight of their mismatch; zero if not known

    def mismatch(self, images: Tensor) -> Tensor:
        guessed = self.front(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        squared = self.values.flatten(1).square().sum(1)
        apart: Tensor = (guessed - self.values).flatten(1).square().sum(1)
        return self.weight * apart / torch.where(squared > 0, squared, 1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "KnownFeatures":
        return KnownFeatures(front=self.front, values=change(self.values), weight=change(self.weight))


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraints:
    """All known constraints on V victims' images and losses.

    ``transform``: the client's transform of its images, applied to the guesses, too. Priors of natural images see the
    guess before the transform, those of the model's inputs after it. ``likeliest``: (V,) total variation weight for use
    with the whole update's cosine distance, chosen by the measured noise; 0 if unknown.
    """

    transform: AssumedTransform | None = None
    smoothness: Tensor | None = None  # (V,) weight of the images' total variation, next to the attack's own priors
    likeliest: Tensor | None = None
    any_contrast: bool = False  # ``True`` if total variation is computed at equal contrast
    unknowns: Unknowns | None = None
    features: KnownFeatures | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Constraints":
        return replace(
            self,
            transform=self.transform and self.transform.map(change),
            smoothness=None if self.smoothness is None else change(self.smoothness),
            likeliest=None if self.likeliest is None else change(self.likeliest),
            features=self.features and self.features.map(change),
        )
