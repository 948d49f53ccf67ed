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

    ``scope``: ``global`` for one norm of all tensors together, ``layer`` for one of each. ``counted``: masks (V,
    *shape) by name, 0 for elements that the client dropped before it clipped; without a mask, all elements of a tensor
    count.
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
    """The clients' norm clipping, in the unit of the tensors that the attack compares, such as gradients."""

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
"""Function of an update and its noise's standard deviation that returns bounds on the true values."""

_THRESHOLD = 3.0  # multiple of the noise's standard deviation below which the smallest shared magnitude may be noise


def where_shared(effect: Sparse, update: Tensors, noise_std: float) -> Bounds:
    """Return bounds on the true values of elements that a client dropped; both bounds of others are the observed value.

    A dropped element lies between plus and minus the smallest magnitude that was kept, or anywhere if the client does
    not keep the largest. ``effect``: the client's sparsification. If noise hides it, all bounds are the observed
    values.
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
    """Return bounds that allow truncated elements any value at or beyond the cut; others keep the observed value."""
    bound = effect.bound or max(float(t.abs().max()) for t in update.values())
    bounds = {}
    for name, t in update.items():
        cut = t.abs() >= (1 - AT_BOUND) * bound
        bounds[name] = t.masked_fill(cut & (t < 0), -torch.inf), t.masked_fill(cut & (t > 0), torch.inf)
    return bounds


def _hidden(effect: Sparse, values: Tensor, noise_std: float) -> tuple[float, float]:
    """Return two magnitudes of dropped elements of ``values`` (n,): the largest observed, and a bound on the true ones.

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
    """Return each quantized element's bin as its bounds; if noise exceeds rounding, both are the observed value."""
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
    """Return bounds on the gradient of ``weight`` for the defense Soteria: infinite in columns that it zeroed.

    Other bounds are the observed values; if noise hides the zeroed columns, all are. ``dropped``: share of zeroed
    columns, those of least norm; ``None``: all that are zero.
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
    """Return infinite bounds for all tensors except those of ``layer``, so that only ``layer`` is compared."""
    others = {name: torch.full_like(t, torch.inf) for name, t in update.items() if name.rpartition(".")[0] != layer}
    return {name: (-most, most) for name, most in others.items()}


def bare_layers(effect: NoisedLayers, reach: float, update: Tensors, noise_std: float) -> Bounds:
    """Return bounds ``reach`` around the observed values of layers with noise; no bounds if every layer has noise."""
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
    """Return whether both bounds of every element are equal."""
    return all(torch.equal(low, high) for low, high in bounds.values())


Transform = Callable[[Tensor], Tensor]  # (N, C, H, W) -> the same, differentiable


@dataclass(frozen=True, eq=False)
class AssumedTransform:
    """Callable that transforms each guessed image by one of ``transforms``; ``chosen`` (V, B): index for each."""

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

    A single image gets transform ``restart`` (number of the attempt) modulo ``number``; several images get random ones.
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
    """Estimate the clipping norm of an update of n elements: root of (squared norm - n ``noise_std``^2)."""
    squared = float(torch.stack([t.double().square().sum() for t in update.values()]).sum())
    return math.sqrt(max(squared - sum(t.numel() for t in update.values()) * noise_std**2, 1e-4 * squared))


def estimate_step(tensor: Tensor) -> float:
    """Estimate the spacing of a quantized tensor's levels: the least difference of two values; 0 for one level."""
    levels = torch.unique(tensor.double())
    return float(levels.diff().min()) if len(levels) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class HiddenGradient:
    """Gradient of a private loss, which only the client knows, with respect to the features; the attack guesses it.

    A feature's gradient is expected to have the size ``strength`` r^``layers``, relative to a cross entropy with factor
    1. The private loss has an output part (head) of ``layers`` layers, whose weights have root mean square r.
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
    """Number of variables that stand for a :class:`HiddenGradient`, and the gradient for a variable of 1."""

    features: int  # number of variables for each example and round
    unit: float  # gradient that a variable of 1 stands for


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateConstraints:
    """Known bounds and clipping of V victims' updates in one round; ``clip`` is ``None`` without clipping."""

    bounds: Bounds  # (V, *shape) each, of the tensors that are not known exactly
    clip: Clips | None

    def to(self, device: torch.device, dtype: torch.dtype) -> "UpdateConstraints":
        move = methodcaller("to", device=device, dtype=dtype)
        bounds = {name: (move(low), move(high)) for name, (low, high) in self.bounds.items()}
        return UpdateConstraints(bounds=bounds, clip=self.clip and self.clip.map(move))


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownFeatures:
    """Penalty on the distance of guesses' features from V victims' true ones, known exactly from a layer's gradient."""

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
    """Everything that the loss of V victims takes into account besides their updates and the attack's own priors.

    ``transform``: the client's transform of its images, also applied to guesses. Priors of natural images see a guess
    before it, those of the model's inputs after it. ``likeliest``: (V,) total variation weight that fits the measured
    noise if the loss is the whole update's cosine distance; 0 if the noise is unknown.
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
