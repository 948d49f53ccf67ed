"""Detection of parts of a release without fresh noise, such as constant directions and repeated values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_privacy.dp_check.draws import ROUNDING, Mechanism, Neighbors, drawn_rows
from fl_privacy.measure.intervals import binomial_lower
from fl_privacy.rng import derive_generator

MOST_ELEMENTS = 1 << 22  # most values of draws on one neighbor that are kept
MOST_COLUMNS = 1 << 17  # most values kept of one release; of a larger release, the first of each array
NUDGE = 1e-2  # relative change of an input that tests whether the release follows
FOLLOWS = 0.1  # largest change of the release by a nudge, relative to its change by the unit; coarse values change more


@dataclass(frozen=True, kw_only=True, eq=False)
class Uncovered:
    """Part of a mechanism's output that gets no fresh noise."""

    reason: str  # phrase that follows "because"
    arrays: tuple[str, ...]  # names of the arrays that hold the part
    moved: float = 0.0  # l2 distance by which the unit moves the part; 0 if unknown


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldDraws:
    """Stored outputs (n, d) of a mechanism, n on each of two neighbors; of large outputs, only d values are stored."""

    first: Tensor
    second: Tensor
    shapes: Mapping[str, torch.Size]
    places: Mapping[str, slice]  # slice of each array in the kept values
    taken: Tensor  # indices (d,) of the kept values in the whole release

    @cached_property
    def shift(self) -> Tensor:
        return self.first.mean(0) - self.second.mean(0)

    @cached_property
    def residuals(self) -> Tensor:
        return torch.cat([self.first - self.first.mean(0), self.second - self.second.mean(0)])

    @cached_property
    def constant(self) -> Tensor:
        largest = torch.maximum(self.first.abs().amax(0), self.second.abs().amax(0))
        near = [ROUNDING * rows[0].abs().clamp_min(1e-3 * largest) for rows in (self.first, self.second)]
        sides = zip((self.first, self.second), near, strict=True)
        return torch.stack([((rows - rows[0]).abs() <= most).all(0) for rows, most in sides]).all(0)

    def names(self, among: Tensor) -> tuple[str, ...]:
        return tuple(name for name, place in self.places.items() if bool(among[place].any()))


def held_rows(mechanism: Mechanism, pair: Neighbors, draws: int, shapes: Mapping[str, torch.Size]) -> HeldDraws:
    """Store outputs for each input of ``pair``: a quarter of ``draws``, or fewer if memory is short."""
    size = sum(shape.numel() for shape in shapes.values())
    kept: dict[str, torch.Size] = {}
    places: dict[str, slice] = {}
    columns, start, before = list[Tensor](), 0, 0
    for name, shape in shapes.items():
        whole = shape.numel()
        number = whole if size <= MOST_COLUMNS else min(whole, 1 + whole * MOST_COLUMNS // size)
        kept[name] = shape if number == whole else torch.Size([number])
        places[name] = slice(before, before + number)
        columns.append(torch.arange(start, start + number))
        start, before = start + whole, before + number
    taken = torch.cat(columns)
    number = min(draws // 4, max(2, MOST_ELEMENTS // len(taken)))
    first, second = (_held(mechanism, given, number, taken) for given in (pair.first, pair.second))
    return HeldDraws(first=first, second=second, shapes=kept, places=places, taken=taken)


def _held(mechanism: Mechanism, given: Any, number: int, taken: Tensor) -> Tensor:
    return torch.cat([rows[:, taken] for rows in drawn_rows(mechanism, given, number)])


def uncovered(
    mechanism: Mechanism, pair: Neighbors, held: HeldDraws, *, shapes: Mapping[str, torch.Size], delta: float, seed: int
) -> list[Uncovered]:
    """Find parts of a mechanism's output that get no fresh noise.

    The outputs ``held`` suggest directions. One is confirmed if fresh outputs are constant along it, differ between the
    inputs of ``pair``, and follow a slight change of the input. Events rarer than the claim's ``delta`` are allowed.
    """
    candidates = [
        each for find in (_constant, _shared, _sums, _left_out) for each in find(held) if float(each[1].norm()) > 0
    ]
    repeated, levels = _repeats(held.first, held), _levels(held)
    if not (candidates or repeated or levels):
        return _coarse(held) or _opposite(held)
    nudged = _nudged(pair.first, derive_generator(seed, "dp_check", "nudge"))
    number = len(held.first)
    after = None if nudged is None else _held(mechanism, nudged, number, held.taken)
    found = _coarse(held)
    if candidates:
        fresh = held_rows(mechanism, pair, 4 * number, shapes)
        found += [
            Uncovered(reason=reason, arrays=held.names(direction != 0), moved=moved)
            for reason, direction in candidates
            if (moved := _confirmed(direction / direction.norm(), held, fresh, after))
        ]
    if after is not None and not found:
        found += _again(held, after, repeated, delta) or _between_levels(held, after, levels)
    return found or _opposite(held)


def _confirmed(direction: Tensor, held: HeldDraws, fresh: HeldDraws, after: Tensor | None) -> float:
    first, second = fresh.first @ direction, fresh.second @ direction
    size = held.second.abs().amax(0) + held.first.abs().amax(0)
    rounded = ROUNDING * (float((direction * size).norm()) + abs(float(first.mean())) + abs(float(second.mean())))
    spread = max(float(side.max() - side.min()) for side in (first, second))
    moved = abs(float(first.mean() - second.mean()))
    if spread > rounded or moved <= 10 * rounded:
        return 0.0
    if after is None:
        means = torch.stack([fresh.first.mean(0), fresh.second.mean(0)])[:, direction != 0]
        return 0.0 if bool((means == means.round()).all()) else moved
    step = (after @ direction - first.mean()).abs()
    follows = float(step.min()) > 0 and rounded / 10 < float(step.median()) <= FOLLOWS * moved
    return moved if follows else 0.0


Found = tuple[str, Tensor]  # reason, and a direction (d,) along which the draws do not vary


def _coarse(held: HeldDraws) -> list[Uncovered]:
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        first, second = (rows.to(kind).to(rows.dtype) == rows for rows in (held.first, held.second))
        found = ~held.constant & second.all(0) & (first.double().mean(0) < 0.5)
        if bool(found.any()) and len(held.second[:, found][:, 0].unique()) > len(second) / 4:
            bits = torch.finfo(kind).bits
            reason = (
                f"the noise is rounded to {bits} bits and the update is not, so that the last bits are the update's"
            )
            return [Uncovered(reason=reason, arrays=held.names(found))]
    return []


def _constant(held: HeldDraws) -> list[Found]:
    shift, constant = held.shift, held.constant
    bare = constant & (shift != 0)
    if not bool(bare.any()):
        return []
    if bool(constant.all()):
        silent = float(held.second.norm()) <= 1e-9 * float(held.first.norm())
        opposite = float((held.first[0] + held.second[0]).norm()) <= 1e-4 * float(held.first[0].norm())
        reason = "the same noise is added each time, so that two replies differ by the data alone"
        if silent or opposite:
            reason = "no noise is added: the same data give the same reply"
    else:
        names = held.names(bare)
        reason = f"{_listed(names)} {'leaves' if len(names) == 1 else 'leave'} without noise"
    return [(reason, torch.where(bare, shift, 0.0))]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shared(held: HeldDraws) -> list[Found]:
    varying = ~held.constant
    if int(varying.sum()) < 2:
        return []
    residuals, places = held.residuals[:, varying], varying.nonzero()[:, 0]
    sizes = residuals.norm(dim=0)
    units = residuals / sizes
    probe = torch.randn(len(units), generator=torch.Generator().manual_seed(1), dtype=units.dtype)
    marks = probe @ units
    signs = marks.sign()
    order = (marks * signs).argsort()
    units = (units * signs)[:, order]
    same = (units[:, 1:] - units[:, :-1]).norm(dim=0) <= 1e-4
    if not bool(same.any()):
        return []
    groups = torch.cat([torch.zeros(1, dtype=torch.long), (~same).long().cumsum(0)])
    noise, shift = (sizes * signs)[order], held.shift[places[order]]
    together = torch.zeros(int(groups[-1]) + 1, dtype=noise.dtype)
    along = together.index_add(0, groups, noise * shift) / together.index_add(0, groups, noise.square())
    alone = torch.bincount(groups)[groups] == 1
    direction = torch.zeros_like(held.shift)
    direction[places[order]] = torch.where(alone, 0.0, shift - noise * along[groups])
    names = held.names(direction != 0)
    return [(f"values in {_listed(names)} carry the same noise, so that their difference has none", direction)]


def _sums(held: HeldDraws) -> list[Found]:
    residuals, shift = held.residuals, held.shift
    variances = residuals.square().mean(0)
    found: list[Found] = []
    for what, labels in _labels(held):
        number = int(labels.max()) + 1
        member = labels >= 0
        sums = torch.zeros(len(residuals), number, dtype=residuals.dtype)
        sums.index_add_(1, labels[member], residuals[:, member])
        alone = torch.zeros(number, dtype=residuals.dtype)
        expected = alone.index_add(0, labels[member], variances[member])
        free = (sums.square().mean(0) <= 1e-8 * expected) & (expected > 0)
        if bool(free.any()):
            moved = torch.where(free, alone.index_add(0, labels[member], shift[member]), 0.0)
            direction = torch.zeros_like(shift)
            direction[member] = moved[labels[member]]
            reason = f"the noise of {what} sums to zero, so that the sum of the values leaves as it is"
            found.append((reason, direction))
    return found


def _labels(held: HeldDraws) -> Iterator[tuple[str, Tensor]]:
    """Yield groupings of values whose sums may lack noise, as (description, group (d,) of each value or -1)."""
    size = held.first.shape[1]
    yield "all arrays together", torch.zeros(size, dtype=torch.long)
    for name, shape in held.shapes.items():
        if shape.numel() < 2:
            continue
        families = {name: torch.zeros(shape.numel(), dtype=torch.long)}
        for axis, length in enumerate(shape):
            others = shape.numel() // length
            if min(length, others) > 1:
                lines = (
                    torch.arange(others).expand(length, others),
                    torch.arange(length)[:, None].expand(length, others),
                )
                laid = [each.reshape(length, *shape[:axis], *shape[axis + 1 :]).movedim(0, axis) for each in lines]
                families[f"{name} along axis {axis}"] = laid[0].reshape(-1)
                if len(shape) > 2:
                    families[f"each slice of {name} across axis {axis}"] = laid[1].reshape(-1)
        for what, labels in families.items():
            whole = torch.full((size,), -1)
            whole[held.places[name]] = labels
            yield what, whole
    for shape in dict.fromkeys(held.shapes.values()):
        names = [name for name, other in held.shapes.items() if other == shape]
        if len(names) > 1 and shape.numel():
            whole = torch.full((size,), -1)
            for name in names:
                whole[held.places[name]] = torch.arange(shape.numel())
            yield f"{_listed(names)} together", whole


def _left_out(held: HeldDraws) -> list[Found]:
    varying = ~held.constant
    residuals = held.residuals[:, varying]
    draws, values = residuals.shape
    if not values:
        return []
    spreads = residuals.square().mean(0).sqrt()
    units, shift = residuals / spreads, held.shift[varying] / spreads
    wide = values >= draws - 2
    sizes, vectors = torch.linalg.eigh(units @ units.T if wide else units.T @ units)
    noisy = sizes > 1e-9 * sizes[-1]
    rank = int(noisy.sum())
    if rank > 0.9 * (draws - 2) if wide else rank == values:
        return []
    basis = vectors[:, noisy]
    if wide:
        basis = units.T @ basis / sizes[noisy].sqrt()
    direction = torch.zeros_like(held.shift)
    direction[varying] = (shift - basis @ (basis.T @ shift)) / spreads
    return [(f"the noise fills {rank:,} of {values:,} directions; in the others the update leaves as it is", direction)]


def _repeats(rows: Tensor, held: HeldDraws) -> dict[str, Tensor]:
    found = {}
    for name, place in held.places.items():
        kept = rows[:, place]
        if not bool((kept[1:] != kept[:1]).any()):
            continue
        values, counts = np.unique(kept.numpy(), axis=0, return_counts=True)
        if bool((counts > 1).any()):
            found[name] = torch.from_numpy(values[counts > 1])
    return found


def _again(held: HeldDraws, after: Tensor, repeated: Mapping[str, Tensor], delta: float) -> list[Uncovered]:
    moved, names = held.shift, []
    after_it = _repeats(after, held)
    for name, values in repeated.items():
        place = held.places[name]
        others = after_it.get(name)
        if others is None or not float(moved[place].norm()) > 0:
            continue
        often = sum(int((held.first[:, place] == value).all(1).sum()) for value in values[:64])
        if float(binomial_lower(np.array([often]), len(held.first), 1e-4)[0]) <= delta:
            continue
        nearest = torch.cdist(others[:256], held.first[:, place]).amin(1)
        if float(nearest.min()) > 0 and float(nearest.median()) <= FOLLOWS * float(moved[place].norm()):
            names.append(name)
    if not names:
        return []
    reason = f"the same values of {_listed(names)} come again in other calls, which fresh noise never lets happen"
    return [Uncovered(reason=reason, arrays=tuple(names))]


MOST_LOOKED_AT = 64
"""Most values of an array that are searched for atoms (repeated values), those that the unit moves most."""


FEWEST_REPEATS = 5  # least number of repetitions of an atom


def _atoms(rows: Tensor, column: int) -> np.ndarray:
    values, counts = np.unique(rows[:, column].numpy(), return_counts=True)
    return values[counts >= FEWEST_REPEATS]


def _levels(held: HeldDraws) -> dict[str, dict[int, np.ndarray]]:
    found = {}
    for name, place in held.places.items():
        moved = held.shift[place].abs()
        looked = (moved.argsort(descending=True)[:MOST_LOOKED_AT] + place.start).tolist()
        atoms = {c: _atoms(held.first, c) for c in looked if not bool(held.constant[c]) and bool(held.shift[c])}
        if kept := {c: each for c, each in atoms.items() if len(each)}:
            found[name] = kept
    return found


def _between_levels(held: HeldDraws, after: Tensor, levels: Mapping[str, Mapping[int, np.ndarray]]) -> list[Uncovered]:
    names = []
    for name, columns in levels.items():
        follow = []
        for column, atoms in columns.items():
            gaps = np.abs(_atoms(after, column)[:, None] - atoms[None]).min(1)
            near = len(gaps) and np.median(gaps) <= FOLLOWS * float(held.shift[column].abs())
            follow.append(bool(near and (gaps > 0).all()))
        if sum(follow) > len(follow) / 2:
            names.append(name)
    if not names:
        return []
    reason = f"the noise of {_listed(names)} is bounded, has few values or is missing in some calls: the update shows"
    return [Uncovered(reason=reason, arrays=tuple(names))]


def _opposite(held: HeldDraws) -> list[Uncovered]:
    rows = held.first[:, ~held.constant]
    largest = rows.abs().amax(0)
    if not rows.shape[1] or _alike(rows, largest) > 0.01:  # a value of few levels is often the same
        return []
    sums = [rows[start:-1:2] + rows[start + 1 :: 2] for start in (0, 1)]
    if max(_alike(each, largest) for each in sums) <= 0.5:
        return []
    reason = "the noise of a call is that of the one before with the other sign, so that their mean has none"
    return [Uncovered(reason=reason, arrays=held.names(~held.constant))]


def _alike(rows: Tensor, largest: Tensor) -> float:
    return float(((rows - rows.median(0).values).abs() <= ROUNDING * largest).all(1).double().mean())


def _nudged(given: Any, rng: torch.Generator) -> Any:
    if isinstance(given, Tensor):
        changed = given * (1 + NUDGE * torch.randn(given.shape, generator=rng).to(given.device))
        return changed.to(given.dtype) if given.is_floating_point() else None
    if isinstance(given, Mapping):
        values = {name: _nudged(value, rng) for name, value in given.items()}
        kept = {name: given[name] if value is None else value for name, value in values.items()}
        return None if all(value is None for value in values.values()) else kept
    if is_dataclass(given) and not isinstance(given, type) and hasattr(given, "inputs"):
        inputs = _nudged(given.inputs, rng)
        return None if inputs is None else replace(given, inputs=inputs)
    return None


def direction_by_covariance(held: HeldDraws, known: Tensor | None) -> Tensor | None:
    """Return the direction (d,) along which outputs on two neighbors differ most, relative to the noise.

    ``known``: neighbors' difference (d,). ``None`` if it is missing or nearly as good, or outputs (``held``) are few.
    """
    residuals = held.residuals
    spreads = residuals.square().mean(0).sqrt()
    varying = ~held.constant
    draws, values = len(residuals), int(varying.sum())
    if known is None or not 1 < values <= draws // 2:
        return None
    units, shift = residuals[:, varying] / spreads[varying], known[varying] / spreads[varying]
    covariance = units.T @ units / draws
    best = torch.linalg.solve(covariance + 1e-9 * torch.eye(values, dtype=units.dtype), shift)
    gain = float(shift @ best) * (draws - values) / draws  # corrects the bias of an inverse from few draws
    plain = float(shift @ shift) ** 2 / max(float(shift @ covariance @ shift), 1e-300)
    if gain <= MORE * plain:
        return None
    direction = torch.zeros_like(held.shift)
    direction[varying] = best / spreads[varying]
    return direction / direction.norm()


MORE = 1.7
"""Least ratio of the squared separation along ``direction_by_covariance`` to that along the neighbors' difference."""
