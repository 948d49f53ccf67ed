"""Distances between guessed and observed gradients."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.layer_statistics import AngularDistance, Coefficients, LayerStatistics
from fl_privacy.errors import UserError

LayerWeights = Mapping[str, float]
"""Glob pattern of parameter names -> weight of the tensors; 0 mutes them, the last match counts, no match means 1."""


class Objective(Protocol):
    """Distance (V,) between guessed and uploaded gradients of V victims, from statistics of each tensor.

    ``elementwise``: ``True`` if it needs the single elements of gradients. ``by_layer``: ``True`` if it computes a
    distance for each tensor, so that small ones can't be concatenated.
    """

    @property
    def elementwise(self) -> bool: ...

    @property
    def by_layer(self) -> bool: ...

    @property
    def layers(self) -> LayerWeights: ...

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor: ...


def layer_weight(layers: LayerWeights, name: str) -> float:
    """Return the weight of the last pattern in ``layers`` that matches ``name``; 1 if none does."""
    matches = [weight for pattern, weight in layers.items() if fnmatch.fnmatchcase(name, pattern)]
    return matches[-1] if matches else 1.0


def weighted_names(layers: LayerWeights, names: Iterable[str]) -> list[str]:
    """List the ``names`` with nonzero weight; ``UserError`` if there are none, or if a pattern matches no name."""
    names = list(names)
    for pattern in layers:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"Layer patterns are expected to match uploaded tensors, but got {pattern!r};"
                f" use one of {', '.join(names)}."
            )
    weighted = [name for name in names if layer_weight(layers, name) != 0]
    if not weighted:
        raise UserError(f"At least one layer is expected to have weight, but all {len(names)} are muted; unmute one.")
    return weighted


def _weighted_sum(layers: LayerWeights, terms: Mapping[str, Tensor]) -> Tensor:
    if not layers:
        return torch.stack(list(terms.values())).sum(0) if len(terms) > 1 else next(iter(terms.values()))
    return torch.stack([layer_weight(layers, name) * term for name, term in terms.items()]).sum(0)


def _lengths(squared: Tensor) -> Tensor:
    return squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()


@dataclass(frozen=True, kw_only=True)
class OfLayers:
    """Base of objectives with a weight for each tensor."""

    layers: LayerWeights = field(default_factory=dict)
    elementwise: bool = field(default=True, init=False)

    @property
    def by_layer(self) -> bool:
        return bool(self.layers)

    def coefficients(self, names: Sequence[str]) -> Coefficients | None:
        """Return (a, b) by tensor if the objective is a sum of a * squared + b * absolute distance, else ``None``."""
        return None


@dataclass(frozen=True, kw_only=True)
class L2(OfLayers):
    """Squared Euclidean distance, summed over all tensors (DLG, Zhu et al. 2019, Eq. 4).

    ``relative`` divides by the observed squared norm, so that the tolerances of L-BFGS also suit small gradients.
    """

    relative: bool = False

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        loss = _weighted_sum(self.layers, {name: s.distance for name, s in statistics.items()})
        if not self.relative:
            return loss
        observed = _weighted_sum(self.layers, {name: s.target.squared for name, s in statistics.items()})
        return loss / observed.clamp_min(torch.finfo(observed.dtype).tiny)

    def coefficients(self, names: Sequence[str]) -> Coefficients | None:
        return None if self.relative else {name: (layer_weight(self.layers, name), 0.0) for name in names}


@dataclass(frozen=True, kw_only=True)
class L1(OfLayers):
    """Sum of absolute differences between guessed and observed gradients, over all tensors."""

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        return _weighted_sum(self.layers, {name: s.absolute for name, s in statistics.items()})

    def coefficients(self, names: Sequence[str]) -> Coefficients:
        return {name: (0.0, layer_weight(self.layers, name)) for name in names}


@dataclass(frozen=True, kw_only=True)
class Cosine(OfLayers):
    """1 - cosine of guessed and observed gradient (Geiping et al. 2020, Eq. 4).

    ``per_layer``: mean distance of the tensors instead of one angle. ``epsilon``: with ``per_layer``, least denominator
    of a cosine (product of norms), as in the authors' code. Tensors that hold only rounding errors, such as biases
    before batch norm in training mode, then get a constant loss of 1.
    """

    per_layer: bool = False
    epsilon: float = 1e-10
    elementwise: bool = field(default=False, init=False)

    @property
    def by_layer(self) -> bool:
        return self.per_layer or bool(self.layers)

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        if self.per_layer:
            terms = {name: self._of_layer(s) for name, s in statistics.items()}
            return _weighted_sum(self.layers, terms) / sum(layer_weight(self.layers, name) for name in statistics)
        squared = {name: s.squared for name, s in statistics.items()}
        observed = _weighted_sum(self.layers, {name: s.target.squared for name, s in statistics.items()})
        total, tiny = _weighted_sum(self.layers, squared).detach(), torch.finfo(observed.dtype).tiny
        absent = (total < tiny) | (observed < tiny)  # no unit vector: no angle
        length, observed_length = (values.masked_fill(absent, 1).sqrt() for values in (total, observed))
        formed = {n: s.guess for n, s in statistics.items() if s.guess is not None and not self.layers}
        others = [name for name in statistics if name not in formed]
        scales = 1 / length, 1 / observed_length
        apart = {name: statistics[name].apart(*scales) for name in others}
        elsewhere = _weighted_sum(self.layers, apart) if others else torch.zeros_like(length)
        guesses, seen = list(formed.values()), [statistics[name].target.value for name in formed]
        found = length, observed_length, elsewhere.detach(), len(guesses), *guesses, *seen
        distance: Tensor = AngularDistance.apply(*found)
        if others:  # add the derivative at a fixed length and that of the length
            along = (distance.detach() / length.square()) * _weighted_sum(self.layers, {n: squared[n] for n in others})
            pull = (elsewhere - along) / 2
            distance = distance + (pull - pull.detach())
        return torch.where(absent, 1, distance)

    def _of_layer(self, statistics: LayerStatistics) -> Tensor:
        length, observed = _lengths(statistics.squared), _lengths(statistics.target.squared)
        product = length * observed
        divisor = product.clamp_min(self.epsilon)
        return (divisor - product + product * statistics.apart(1 / length, 1 / observed) / 2) / divisor


@dataclass(frozen=True, kw_only=True)
class GaussianKernel(OfLayers):
    """Sum over layers of Q_l (1 - exp(-||g' - g||^2 / sigma_l^2)) (SAPAG, Wang et al. 2020, Eq. 4 and 5).

    Attributes:
        form: formula of sigma_l^2. ``literal``: the variance of the observed g_l over its elements; a layer norm's
            gradient then rounds to 0. ``normalized``: that variance times the number of elements that a kernel
            compares.
        depth: rule by which the weight Q_l falls from 1 at the first tensor to ``last`` at the final one; the paper
            gives no values.
        per: elements that one kernel compares: each ``tensor``; a ``layer`` (weight and bias), as in Eq. 4; or each
            ``element`` by itself, with its layer's variance as sigma_l^2, as in Eq. 6 and 7.
    """

    form: Literal["literal", "normalized"] = "normalized"
    bandwidth: float = 1.0  # factor on sigma_l^2
    depth: Literal["constant", "linear", "geometric"] = "linear"
    last: float = 0.5  # Q of the last tensor, above 0
    per: Literal["tensor", "layer", "element"] = "tensor"
    by_layer: bool = field(default=True, init=False)

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        if self.per != "tensor":
            return self._by_layer(statistics)
        terms = {}
        for position, (name, s) in enumerate(statistics.items()):
            kernel = self._kernel(s.distance, s.target.variance, s.target.size)
            terms[name] = self._depth_weight(position, len(statistics)) * kernel
        return _weighted_sum(self.layers, terms)

    def _by_layer(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        grouped: dict[str, list[tuple[float, LayerStatistics]]] = {}
        for name, s in statistics.items():
            grouped.setdefault(name.rpartition(".")[0], []).append((layer_weight(self.layers, name), s))
        terms = []
        for position, members in enumerate(grouped.values()):
            targets = [s.target for _, s in members]
            size = sum(t.size for t in targets)
            mean = torch.stack([t.mean * t.size for t in targets]).sum(0) / size
            variance = torch.stack([t.squared for t in targets]).sum(0) / size - mean.square()
            if self.per == "element":
                kernels = [w * self._kernel(s.difference.square(), variance[:, None], 1).sum(1) for w, s in members]
                kernel = torch.stack(kernels).sum(0)
            else:
                kernel = self._kernel(torch.stack([w * s.distance for w, s in members]).sum(0), variance, size)
            terms.append(self._depth_weight(position, len(grouped)) * kernel)
        return torch.stack(terms).sum(0)

    def _kernel(self, distance: Tensor, variance: Tensor, size: int) -> Tensor:
        sigma = self.bandwidth * variance * (size if self.form == "normalized" else 1)
        return -torch.expm1(-distance / sigma.clamp_min(torch.finfo(sigma.dtype).tiny))

    def _depth_weight(self, position: int, count: int) -> float:
        share = position / max(count - 1, 1)
        if self.depth == "linear":
            return 1 + (self.last - 1) * share
        return float(self.last**share) if self.depth == "geometric" else 1.0


@dataclass(frozen=True, kw_only=True)
class WeightedL2L1(OfLayers):
    """Squared Euclidean plus ``alpha`` times absolute distance of each tensor (TAG, Deng et al. 2021, Eq. 5).

    A factor on ``alpha`` falls linearly from 1 at the first tensor to ``last`` at the last. ``relative`` divides by the
    loss of a zero gradient, so that the gradients' size does not count.
    """

    alpha: float = 0.1
    last: float = 0.1
    relative: bool = False
    by_layer: bool = field(default=True, init=False)

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        weights = self._weights(list(statistics))
        terms = [weights[name][0] * s.distance + weights[name][1] * s.absolute for name, s in statistics.items()]
        loss = torch.stack(terms).sum(0)
        if not self.relative:
            return loss
        targets = {name: s.target for name, s in statistics.items()}
        observed = [weights[n][0] * t.squared + weights[n][1] * t.value.abs().sum(1) for n, t in targets.items()]
        return loss / torch.stack(observed).sum(0).clamp_min(torch.finfo(loss.dtype).tiny)

    def coefficients(self, names: Sequence[str]) -> Coefficients | None:
        return None if self.relative else self._weights(names)

    def _weights(self, names: Sequence[str]) -> Coefficients:
        shares = [position / max(len(names) - 1, 1) for position in range(len(names))]
        layers = [layer_weight(self.layers, name) for name in names]
        return {
            name: (layer, layer * self.alpha * (1 + (self.last - 1) * share))
            for name, layer, share in zip(names, layers, shares, strict=True)
        }
