"""Columns of a table, and encoding of its rows as model inputs."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from fl_privacy.errors import UserError

TOLERANCE = 0.319
"""Largest error of a number that counts as right, in standard deviations (TabLeak, Vero et al. 2023, section 5)."""

MOST_COLUMNS, MOST_CATEGORIES, MOST_VALUES = 2_000, 10_000, 100_000
"""Most columns of a table, categories of a column, and values of an encoded row."""

MOST_DECIMALS = 20  # most decimals of a number as text


@dataclass(frozen=True, kw_only=True)
class Column:
    """Column of a table: numbers, or categories in one-hot encoding, and the scaling of its values."""

    name: str
    categories: tuple[str, ...] = ()  # names, in the order of their encoded values; empty for a numeric column
    shift: tuple[float, ...]  # offset of each value: its mean, or 0
    scale: tuple[float, ...]  # divisor of each value: its standard deviation, or 1
    low: float = -math.inf  # least number of the column
    high: float = math.inf  # largest number
    decimals: int = 0
    std: float = 0.0  # standard deviation to which the largest error of a right number is proportional; 0: ``scale``

    def __post_init__(self) -> None:
        width = max(1, len(self.categories))
        if width > MOST_CATEGORIES:
            raise UserError(
                f"Column {self.name} is expected to have at most {MOST_CATEGORIES} categories, but has {width};"
                " leave it out by data.leave_out."
            )
        sound = all(map(math.isfinite, (*self.shift, *self.scale, self.std))) and min(self.scale, default=0) > 0
        if not 0 <= self.decimals <= MOST_DECIMALS or self.std < 0 or not self.low <= self.high:
            raise UserError(
                f"Column {self.name} is expected to have 0 to {MOST_DECIMALS} decimals, std >= 0, low <= high, but got"
                f" decimals={self.decimals}, std={self.std}, low={self.low}, high={self.high}; correct it."
            )
        if len(self.shift) != width or len(self.scale) != width or not sound:
            raise UserError(
                f"Column {self.name} is expected to have {width} finite shift and positive scale values, but got"
                f" {len(self.shift)} and {len(self.scale)}; let the schema be found from the data."
            )

    @property
    def is_number(self) -> bool:
        return not self.categories

    @property
    def tolerance(self) -> float:
        return TOLERANCE * (self.std or self.scale[0]) if self.is_number else 0.0

    def written(self, value: float) -> str:
        if not math.isfinite(value):
            return "?"
        if self.is_number:
            return f"{round(value, self.decimals) + 0.0:.{self.decimals}f}"  # no sign in front of zero
        return self.categories[int(value)] if 0 <= int(value) < len(self.categories) else "?"


@dataclass(frozen=True)
class Schema:
    """Columns of a table without its target; public in a federation, so that all clients encode rows equally.

    A row has C cells (numbers or category indices) and is encoded as F values.
    """

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.columns) <= MOST_COLUMNS:
            raise UserError(
                f"A table is expected to have 1 to {MOST_COLUMNS} columns in addition to its target, but has"
                f" {len(self.columns)}; add one, or leave some out by data.leave_out."
            )
        if self.width > MOST_VALUES:
            raise UserError(
                f"A row is expected to be encoded in at most {MOST_VALUES} values, but takes {self.width};"
                " leave out columns with many by data.leave_out."
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @cached_property
    def width(self) -> int:
        return sum(len(column.shift) for column in self.columns)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the index of the first encoded value of each of the C columns."""
        widths = [len(column.shift) for column in self.columns]
        return tuple(sum(widths[:number]) for number in range(len(widths)))

    @cached_property
    def numbers(self) -> Tensor:
        return torch.tensor([column.is_number for column in self.columns])

    @cached_property
    def number_values(self) -> Tensor:
        return torch.tensor(self.starts)[self.numbers]

    @cached_property
    def groups(self) -> tuple[Tensor, Tensor]:
        """Return, for each of G categorical columns, the indices (G, L) of its values in an encoded row, and a mask.

        L: most categories of a column; the mask is false for padding to L.
        """
        pairs = zip(self.starts, self.columns, strict=True)
        picked = [(start, len(column.categories)) for start, column in pairs if column.categories]
        longest = max((size for _, size in picked), default=1)
        places = [[start + k if k < size else start for k in range(longest)] for start, size in picked]
        there = [[k < size for k in range(longest)] for _, size in picked]
        indices, mask = torch.tensor(places, dtype=torch.long), torch.tensor(there, dtype=torch.bool)
        return indices.reshape(-1, longest), mask.reshape(-1, longest)

    @cached_property
    def shift(self) -> Tensor:
        return torch.tensor([value for column in self.columns for value in column.shift])

    @cached_property
    def scale(self) -> Tensor:
        return torch.tensor([value for column in self.columns for value in column.scale])

    @cached_property
    def bounds(self) -> Tensor:
        """Return (2, N): the least and the largest encoded value of each of the N numeric columns."""
        return (torch.stack(self._limits).float() - self.shift[self.number_values]) / self.scale[self.number_values]

    @cached_property
    def tolerances(self) -> Tensor:
        """Return the largest error (C,) of a right cell: ``TOLERANCE`` standard deviations for numbers, else 0."""
        return torch.tensor([column.tolerance for column in self.columns], dtype=torch.float64)

    @cached_property
    def usual(self) -> Tensor:
        """Return the encoded row (F,) to guess without an update: each category's share, and 0 for numbers.

        If the shares are unknown, they are equal. A 0 outside a number's bounds is moved to the nearest bound.
        """
        found, (low, high) = torch.zeros(self.width), self.bounds
        for start, column in zip(self.starts, self.columns, strict=True):
            if not column.is_number:
                shares = torch.tensor(column.shift if sum(column.shift) > 0 else column.scale).clamp_min(0)
                found[start : start + len(shares)] = shares / shares.sum()
        found[self.number_values] = torch.zeros_like(low).maximum(low).minimum(high)
        return found

    def encode(self, cells: Tensor) -> Tensor:
        """Encode cells (..., C) as values (..., F) float32."""
        cells = torch.as_tensor(cells, dtype=torch.float64)
        pairs = zip(self.columns, cells.unsqueeze(-1).unbind(-2), strict=True)
        parts = [own if c.is_number else (own == torch.arange(len(c.categories))).double() for c, own in pairs]
        return ((torch.cat(parts, -1) - self.shift.double()) / self.scale.double()).float()

    def raw(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale.to(inputs) + self.shift.to(inputs)

    def cells(self, inputs: Tensor) -> Tensor:
        """Decode values (..., F) to cells (..., C) float64: numbers within their bounds, and likeliest categories."""
        raw = self.raw(inputs.detach().cpu().double())
        found = raw.new_empty((*raw.shape[:-1], len(self.columns)))
        found[..., self.numbers] = raw[..., self.number_values].clamp(*self._limits)
        places, there = self.groups
        if len(places):
            found[..., ~self.numbers] = raw[..., places].masked_fill(~there, -math.inf).argmax(-1).double()
        return found

    @cached_property
    def _limits(self) -> tuple[Tensor, Tensor]:
        own = [column for column in self.columns if column.is_number]
        low, high = ([getattr(c, end) for c in own] for end in ("low", "high"))
        return torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)

    def nearest(self, inputs: Tensor) -> Tensor:
        """Return the possible encoded rows (..., F) nearest to ``inputs`` (..., F)."""
        return self.encode(self.cells(inputs)).to(inputs)

    def drawn(self, number: int, rng: torch.Generator) -> Tensor:
        """Draw ``number`` encoded rows (N, F): categories by their shares, numbers from N(0, 1) within their bounds."""
        cells = torch.empty(number, len(self.columns), dtype=torch.float64)
        for place, column in enumerate(self.columns):
            if column.is_number:
                own = torch.randn(number, generator=rng, dtype=torch.float64) * column.scale[0] + column.shift[0]
                cells[:, place] = own.clamp(column.low, column.high)
            else:
                shares = self.usual[self.starts[place] : self.starts[place] + len(column.categories)]
                cells[:, place] = torch.multinomial(shares, number, replacement=True, generator=rng).double()
        return self.encode(cells)

    def written(self, cells: Tensor) -> list[list[str]]:
        return [[c.written(v) for c, v in zip(self.columns, row, strict=True)] for row in cells.tolist()]

    @classmethod
    def inferred(cls, inputs: Tensor, names: Sequence[str] = ()) -> "Schema":
        """Infer the schema of rows (N, F): neighboring columns of 0 and 1 that sum to 1 become one categorical column.

        ``names`` are those of the F columns. ``UserError`` unless ``inputs`` are finite numbers of at least two rows.
        """
        if inputs.dim() != 2 or len(inputs) < 2 or not bool(torch.isfinite(inputs.double()).all()):
            raise UserError(
                f"Rows are expected to be at least two, of finite numbers (N, F), but got {tuple(inputs.shape)};"
                " give the columns as Schema(...)."
            )
        values, columns, at = inputs.detach().cpu().double(), [], 0
        binary = ((values == 0) | (values == 1)).all(0).tolist()
        while at < values.shape[1]:
            size = _group_at(values, binary, at)
            name = names[at] if at < len(names) else f"column {at + 1}"
            if size > 1:
                named = tuple(names[at : at + size]) or tuple(str(k) for k in range(size))
                columns.append(Column(name=name, categories=named, shift=(0.0,) * size, scale=(1.0,) * size))
            else:
                columns.append(number_column(name, values[:, at]))
            at += size
        return cls(tuple(columns))


def _group_at(values: Tensor, binary: Sequence[bool], at: int) -> int:
    total = torch.zeros(len(values), dtype=values.dtype)
    for end in range(at, values.shape[1]):
        if not binary[end]:
            return 1
        total = total + values[:, end]
        if bool((total > 1).any()):
            return 1
        if bool((total == 1).all()):
            return end - at + 1
    return 1


def number_column(name: str, values: Tensor) -> Column:
    """Return the ``Column`` that describes the unscaled numbers ``values`` (N,)."""
    std = float(values.std()) or 1.0
    whole, low, high = bool((values == values.round()).all()), float(values.min()), float(values.max())
    decimals = 0 if whole else min(MOST_DECIMALS, max(0, 2 - math.floor(math.log10(std))))
    return Column(name=name, shift=(0.0,), scale=(1.0,), low=low, high=high, std=std, decimals=decimals)


M = TypeVar("M")


def with_schema(model: M, schema: Schema) -> M:
    """Return a shallow copy of ``model`` with an attribute ``schema``, which describes the rows that it takes."""
    known = copy.copy(model)
    known.schema = schema  # type: ignore[attr-defined]
    return known


def schema_of(model: object) -> Schema | None:
    """Return the schema of the input rows of ``model``, or ``None``."""
    found = getattr(model, "schema", None)
    return found if isinstance(found, Schema) else None
