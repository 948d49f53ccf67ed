"""Bound the undefended update given the one observed, and transform guesses as the client may have."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive.estimates import estimate_step
from fl_privacy.data.transformations import Policy, Table, apply_policy
from fl_privacy.effects import NoisedLayers, Quantized, Sparse
from fl_privacy.types import Tensors

Bounds = Mapping[str, tuple[Tensor, Tensor]]
"""Name -> least and largest value of each element; names that are missing were uploaded as they are."""

Rule = Callable[[Tensors, float], Bounds]
"""Map from an update and the standard deviation of its noise to bounds.

A value that noise hides more than the defense does stays as observed: its least and largest value are the same."""

_THRESHOLD = 3.0
"""Multiple of the noise's standard deviation below which the smallest shared magnitude may be noise itself."""


def where_shared(effect: Sparse) -> Rule:
    """Build the rule for sparse updates: zeros may have been anything below the smallest kept value.

    After noise or clipping, the known share of smallest values counts as zero.
    """

    def rule(update: Tensors, noise_std: float) -> Bounds:
        bounds = {}
        for layers in [[name] for name in update] if effect.scope == "layer" else [list(update)]:
            part = {name: update[name] for name in layers}
            least, limit = _hidden(effect, torch.cat([t.flatten() for t in part.values()]), noise_std)
            for name, t in part.items():
                hidden = t.abs() <= least
                bounds[name] = t.masked_fill(hidden, -limit), t.masked_fill(hidden, limit)
        return bounds

    return rule


def _hidden(effect: Sparse, values: Tensor, noise_std: float) -> tuple[float, float]:
    """Return the largest magnitude among possibly dropped elements of ``values`` (n,), and a bound on their values.

    It is below 0, for no element, if noise hides the dropped ones.
    """
    sizes = values.abs()
    dropped = int((effect.dropped or 0.0) * len(sizes) + 1e-6)
    least = float(sizes.kthvalue(dropped).values) if dropped else 0.0
    kept = sizes[sizes > least]
    bounded = effect.largest and not (effect.error_feedback or effect.noise_std)
    limit = float(kept.min()) if bounded and len(kept) else torch.inf
    if bounded and len(kept):
        drowned = limit <= _THRESHOLD * noise_std
    else:
        drowned = _drowned(sizes, dropped / len(sizes), noise_std)
    return (-1.0, 0.0) if drowned else (least, limit)


def _drowned(values: Tensor, dropped: float, noise_std: float) -> bool:
    """Return ``True`` if the kept values are smaller than the noise."""
    return noise_std > 0 and float(values.square().mean()) <= (2 - dropped) * noise_std**2


def within_bins(effect: Quantized) -> Rule:
    """Build the rule for quantized updates: elements may be anything that rounds to the observed level.

    If the noise is larger than the bins, values stay as observed.
    """
    stochastic = effect.rounding != "nearest"

    def rule(update: Tensors, noise_std: float) -> Bounds:
        bins = {name: _bin(t, effect.bits, stochastic=stochastic) for name, t in update.items()}
        rounded = sum(float((high - low).square().sum()) / 12 for low, high in bins.values())
        drowned = rounded <= noise_std**2 * sum(t.numel() for t in update.values())
        return {name: (t, t) for name, t in update.items()} if drowned else bins

    return rule


def _bin(tensor: Tensor, bits: int | None, *, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Return the least and largest value of each element, never beyond the largest magnitude."""
    largest = tensor.abs().max()
    if bits == 1 and not stochastic:
        inf = torch.full_like(tensor, torch.inf)
        return torch.where(tensor < 0, -inf, 0.0), torch.where(tensor < 0, 0.0, inf)
    step = estimate_step(tensor) if bits is None else 2 * float(largest) / max(1, 2**bits - 2)
    reach = step if stochastic else step / 2
    return (tensor - reach).clamp_min(-largest), (tensor + reach).clamp_max(largest)


def shared_columns(weight: str, dropped: float | None) -> Rule:
    """Build the rule that leaves the zero columns of ``weight`` unconstrained, as after Soteria.

    Under noise, the columns with the smallest norms count as zero.
    """

    def rule(update: Tensors, noise_std: float) -> Bounds:
        if weight not in update:
            return {}
        t = update[weight]
        if _drowned(t, dropped or 0.0, noise_std):
            return {weight: (t, t)}
        sizes = torch.linalg.vector_norm(t, dim=0)
        muted = int((dropped or 0.0) * len(sizes) + 1e-6)
        hidden = (sizes <= (sizes.kthvalue(muted).values if muted else 0.0)).expand_as(t)
        return {weight: (t.masked_fill(hidden, -torch.inf), t.masked_fill(hidden, torch.inf))}

    return rule


def only_layer(layer: str) -> Rule:
    """Build the rule that leaves all tensors but those of ``layer`` unconstrained."""

    def rule(update: Tensors, noise_std: float) -> Bounds:
        return {
            name: (torch.full_like(t, -torch.inf), torch.full_like(t, torch.inf))
            for name, t in update.items()
            if name.rpartition(".")[0] != layer
        }

    return rule


def bare_layers(effect: NoisedLayers, reach: float) -> Rule:
    """Build the rule for noise on some layers: values are within ``reach`` of those observed there, exact elsewhere."""

    def rule(update: Tensors, noise_std: float) -> Bounds:
        noised = effect.noised(update)
        if len(noised) == len(update):
            return {}
        return {name: (update[name] - reach, update[name] + reach) for name in update if name in noised}

    return rule


def widest(bounds: Iterable[Bounds]) -> Bounds:
    """Join ``bounds`` into the widest for each element."""
    result: dict[str, tuple[Tensor, Tensor]] = {}
    for one in bounds:
        for name, (low, high) in one.items():
            before = result.get(name, (low, high))
            result[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)
    return result


def all_known(bounds: Bounds) -> bool:
    """Return ``True`` if every value is as observed."""
    return all(torch.equal(low, high) for low, high in bounds.values())


Transform = Callable[[Tensor], Tensor]
"""(N, C, H, W) -> the same, differentiable."""


@dataclass(frozen=True, eq=False)
class AssumedTransform:
    """Transforms that each guessed image is assumed to have gone through; ``chosen`` (V, B) are their indices."""

    transforms: Sequence[Transform]
    chosen: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        flat, chosen = images.flatten(0, 1), self.chosen.flatten()
        rows = [(chosen == number).nonzero().flatten() for number in range(len(self.transforms))]
        changed = [transform(flat[some]) for transform, some in zip(self.transforms, rows, strict=True) if len(some)]
        back = torch.cat(rows).argsort()
        return torch.cat(changed)[back].reshape(images.shape)

    def map(self, change: Callable[[Tensor], Tensor]) -> "AssumedTransform":
        return AssumedTransform(self.transforms, change(self.chosen))


def choose_transforms(number: int, restart: int, size: int, generator: torch.Generator) -> Tensor:
    """Choose one of ``number`` transforms (B,) for each image: in turn for a single image, at random for a batch."""
    if size == 1:
        return torch.tensor([restart % number])
    return torch.randint(number, (size,), generator=generator)


def outcomes(policies: Sequence[str], *, table: Table = "paper", by_probability: bool = False) -> tuple[Transform, ...]:
    """List the different transforms that ``policies`` can apply to an image, with all signs.

    Args:
        by_probability: ``True`` if the client leaves operations out at random.
    """
    found: dict[tuple[Policy, tuple[int, ...]], None] = {}
    for policy in (Policy.parse(name, table) for name in policies):
        kept = [policy]
        if by_probability:
            kept = [
                Policy(part, table)
                for n in range(len(policy.indices) + 1)
                for part in itertools.combinations(policy.indices, n)
            ]
        for one in kept:
            signs = [(1, -1) if operation.signed else (1,) for operation in one.operations]
            found |= dict.fromkeys((one, combination) for combination in itertools.product(*signs))
    return tuple(partial(apply_policy, policy=policy, signs=signs) for policy, signs in found)
