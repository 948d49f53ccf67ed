"""Draws of a mechanism on two neighbors, and the statistics of each draw."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.progress import counted
from fl_privacy.types import Tensors

T = TypeVar("T")

Mechanism = Callable[[Any], Tensors]
"""Function from an update or other input to the release, with fresh randomness at each call."""

MOST_TENSORS = 24  # most arrays that are examined one by one: the first and the last ones


@dataclass(frozen=True, kw_only=True)
class ManyAtOnce:
    """Mechanism that can make many outputs in one call."""

    many: Callable[[Any, int], Tensors]  # function (input, n) that makes n independent releases: arrays (n, ...)

    def __call__(self, given: Any) -> Tensors:
        return {name: values[0] for name, values in self.many(given, 1).items()}


@dataclass(eq=False)
class ByRound:
    """Mechanism whose outputs depend on the round; each call is the next round."""

    at: Callable[[Any, int], Tensors]  # function (input, round) that returns the release of that round
    rounds: int = 0  # number of calls so far

    def __call__(self, given: Any) -> Tensors:
        self.rounds += 1
        return self.at(given, self.rounds)


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbors:
    """Two neighboring inputs of a mechanism: they differ in one unit (an example, or all data of a client)."""

    first: Any  # input with the unit
    second: Any  # input without the unit, or with another one in its place
    what: str  # description of the pair
    norm: float | None = None  # l2 norm of the difference before clipping, if known
    at_random: bool = False  # ``True`` if the direction of ``first`` in each array is uniformly random
    shift: Tensors | None = None  # difference of the two releases without their noise, if known


def flattened(sent: Tensors, *, draws: int | None = None) -> Tensor:
    """Concatenate the arrays of an output into one vector (d,) float64.

    ``draws``: number of outputs in the arrays (draws, ...); the result is then (draws, d). ``UserError`` if the output
    is no mapping of tensors, or has no values, or one that is not finite and real.
    """
    tensors = [_real(value) for value in sent.values()] if isinstance(sent, Mapping) else []
    if not sum(0 if one is None else one.numel() for one in tensors) or any(one is None for one in tensors):
        kinds = (
            {type(value).__name__ for value in sent.values()} if isinstance(sent, Mapping) else {type(sent).__name__}
        )
        raise UserError(
            "A mechanism is expected to return its arrays by name, of real numbers, but returned"
            f" {', '.join(sorted(kinds)) or 'nothing'}; return {{'name': tensor}}."
        )
    shape = (-1,) if draws is None else (draws, -1)
    rows = torch.cat([one.reshape(shape).to(torch.float64) for one in tensors if one is not None], -1)
    if not bool(rows.isfinite().all()):
        raise UserError("A mechanism is expected to return finite values, but some are not; bound its input.")
    return rows


def _real(value: Any) -> Tensor | None:
    with suppress(TypeError, ValueError, RuntimeError):
        found = torch.as_tensor(value).detach()
        return None if found.is_complex() else found
    return None


def slices_of(sent: Tensors) -> dict[str, slice]:
    """Return the slice of each array in ``flattened(sent)``."""
    places, start = {}, 0
    for name, value in sent.items():
        number = torch.as_tensor(value).numel()
        places[name] = slice(start, start + number)
        start += number
    return places


def looked_at(places: Mapping[str, T]) -> dict[str, T]:
    """Shorten ``places`` (array name -> any value) to the first and last entries, ``MOST_TENSORS`` at most."""
    if len(places) <= MOST_TENSORS:
        return dict(places)
    names = list(places)
    return {name: places[name] for name in (*names[: MOST_TENSORS // 2], *names[-MOST_TENSORS // 2 :])}


@dataclass(frozen=True, kw_only=True, eq=False)
class Pilot:
    """Means and spread of a few outputs (d,) on each of two neighbors, by which a test chooses its projections."""

    neighbors: Neighbors
    means: Tensor  # means (2, d) on the first and the second neighbor
    deviations: Tensor  # pooled standard deviation (d,)
    constant: Tensor  # mask (d,) of values that vary only by rounding on each neighbor
    norms: Tensor  # l2 norm (2, n) of each release

    @property
    def shift(self) -> Tensor:
        return self.means[0] - self.means[1]

    @property
    def bare(self) -> Tensor:
        """Return a mask (d,) of values that have no noise and differ between the neighbors."""
        whole = (self.means == self.means.round()).all(0)
        return self.constant & (self.shift != 0) & ~whole

    def separation(self, directions: Sequence[Tensor]) -> float:
        """Return the distance of the neighbors' mean outputs along the best of ``directions``, or else over all values.

        It is in standard deviations of the noise, and infinite if a value without noise differs.
        """
        if bool(self.bare.any()):
            return math.inf
        noisy = self.deviations > 0
        if not bool(noisy.any()):
            return 0.0
        if directions:
            spreads = [float((direction * self.deviations).norm()) for direction in directions]
            shifts = [abs(float(direction @ self.shift)) for direction in directions]
            return max((shift / spread for shift, spread in zip(shifts, spreads, strict=True) if spread), default=0.0)
        draws = self.norms.shape[1]
        square = float((self.shift[noisy] / self.deviations[noisy]).square().sum()) - 2 * int(noisy.sum()) / draws
        return math.sqrt(max(0.0, square))


ROUNDING = 1e-6  # relative difference of values that counts as rounding
CHUNK_ELEMENTS = 1 << 21  # most values of releases that are held at once


def drawn_rows(mechanism: Mechanism, given: Any, draws: int) -> Iterator[Tensor]:
    """Yield ``draws`` outputs on the input ``given``, k at a time as (k, d) float64; ``UserError`` if sizes differ."""
    left, size, width = draws, 1, None
    while left and isinstance(mechanism, ManyAtOnce):
        made = flattened(mechanism.many(given, size), draws=size)
        yield made
        left -= size
        size = min(left, max(1, CHUNK_ELEMENTS // made.shape[1]))
    while left:
        first = flattened(mechanism(given))
        size = min(left, max(1, CHUNK_ELEMENTS // len(first)))
        rows = [first, *(flattened(mechanism(given)) for _ in range(size - 1))]
        width = width or len(first)
        if other := next((len(row) for row in rows if len(row) != width), None):
            raise UserError(
                f"A mechanism is expected to return as many values each time, but returned {other} after {width};"
                " return all arrays."
            )
        yield torch.stack(rows)
        left -= size


def pilot(mechanism: Mechanism, neighbors: Neighbors, draws: int) -> Pilot:
    """Draw ``draws`` outputs on each neighbor, and return means, deviations and norms of the two samples."""
    means, variances, constant, norms = [], [], [], []
    for given in (neighbors.first, neighbors.second):
        chunks = list(drawn_rows(mechanism, given, draws))
        start = chunks[0][0]
        mean = torch.stack([(rows - start).sum(0) for rows in chunks]).sum(0) / draws
        square = torch.stack([(rows - start).square().sum(0) for rows in chunks]).sum(0) / draws
        means.append(start + mean)
        variances.append((square - mean.square()).clamp_min(0) * draws / max(1, draws - 1))
        near = ROUNDING * start.abs()
        constant.append(torch.stack([((rows - start).abs() <= near).all(0) for rows in chunks]).all(0))
        norms.append(torch.cat([rows.norm(dim=1) for rows in chunks]))
    return Pilot(
        neighbors=neighbors,
        means=torch.stack(means),
        deviations=torch.stack(variances).mean(0).sqrt(),
        constant=constant[0] & constant[1],
        norms=torch.stack(norms),
    )


UNCHANGED = "the number of values that leave unchanged"  # name of the statistic that counts unchanged values


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Choice of an output's statistics: projections, counts of zeros and unchanged values, angles to the update."""

    names: Sequence[str]
    directions: Tensor  # unit vectors (P, d) onto which releases are projected
    update: Tensor | None = None  # release (d,) of the first neighbor without clipping and noise, if known
    lines: Mapping[str, slice] = field(default_factory=dict)  # slices of arrays with an angle to ``update``

    def of(self, rows: Tensor) -> Tensor:
        """Return S statistics (k, S) of k outputs (k, d): projections, number of zeros, largest magnitude.

        If ``update`` is known, also the number of values equal to it, and by array the sine of the angle to it.
        """
        counts = [(rows == 0).sum(1).to(rows.dtype), rows.abs().amax(1)]
        if self.update is not None:
            counts.append(((rows == self.update) & (self.update != 0)).sum(1).to(rows.dtype))
            for place in self.lines.values():
                some, unit = rows[:, place], self.update[place] / self.update[place].norm()
                across, lengths = some - (some @ unit)[:, None] * unit, some.norm(dim=1)
                counts.append(torch.where(lengths > 0, across.norm(dim=1) / lengths.clamp_min(1e-300), 1.0))
        return torch.cat([rows @ self.directions.T, torch.stack(counts, dim=1)], dim=1)


FEWEST_ON_A_LINE = 4  # least number of values of an array in which angles are computed


def directions_of(known: Tensor, places: Mapping[str, slice]) -> dict[str, Tensor]:
    """Return description -> unit vector (d,) of the neighbors' difference ``known`` and of its part in each array."""
    candidates = {"the direction of the update": known}
    for name, place in looked_at(places).items():
        alone = torch.zeros_like(known)
        alone[place] = known[place]
        candidates[f"the update in {name}"] = alone
    return {name: vector / vector.norm() for name, vector in candidates.items() if float(vector.norm()) > 0}


def statistics_for(
    found: Pilot, places: Mapping[str, slice], known: Tensor | None, also: Mapping[str, Tensor]
) -> Statistics:
    """Choose the statistics of an output by which a test distinguishes two neighbors.

    Outputs are projected onto (1) the neighbors' difference ``known`` (d,), or that of the means in ``found``; (2) its
    part in each array (``places``: slices); (3) the direction of most difference per noise; (4) ``also``, by name.
    """
    kept = directions_of(found.shift if known is None else known, places)
    lines: dict[str, slice] = {}
    if known is not None:
        # the update with the arrays sent in addition, each weighted by its power to distinguish
        others = {name: place for name, place in places.items() if not bool(known[place].any())}
        weights = torch.zeros_like(known)
        for place in others.values():
            weights[place] = found.shift[place] / found.deviations[place].clamp_min(1e-300).square()
        weights[found.deviations == 0] = 0.0
        if float(weights.norm()) > 0:
            unit = known / known.norm()
            spread = (unit * found.deviations).square().sum()
            both = weights + (unit * (unit @ found.shift) / spread if float(spread) > 0 else 0.0)
            kept[f"the update with {', '.join(looked_at(others))}"] = both / both.norm()
        if found.neighbors.at_random:
            lines = {
                name: place
                for name, place in looked_at(places).items()
                if place.stop - place.start >= FEWEST_ON_A_LINE and bool(known[place].any())
            }
    weights = torch.where(found.deviations > 0, found.shift / found.deviations.clamp_min(1e-300).square(), 0.0)
    if float(weights.norm()) > 0:
        kept["the direction in which the draws differ"] = weights / weights.norm()
    kept |= also
    if not kept:
        kept = {"the first value": torch.nn.functional.one_hot(torch.tensor(0), len(found.shift)).to(found.shift)}
    unchanged = (UNCHANGED, *(f"the angle to the update in {name}" for name in lines)) if known is not None else ()
    names = (*kept, "the number of zeros", "the largest value", *unchanged)
    return Statistics(names=names, directions=torch.stack(list(kept.values())), update=known, lines=lines)


def draw_statistics(
    mechanism: Mechanism, neighbors: Neighbors, statistics: Statistics, draws: int
) -> tuple[Tensor, Tensor]:
    """Return the S statistics (draws, S) of fresh outputs on each neighbor."""
    first, second = (
        torch.cat([statistics.of(rows) for rows in drawn_rows(mechanism, given, draws)])
        for given in counted("neighbor", (neighbors.first, neighbors.second))
    )
    return first, second
