"""Examples of a client within what it sends: as they are, in other shapes and orders, multiplied, or among bytes.

Equal numbers are evidence by how unlikely they are, so that two zeros and a one that a row has as well say nothing, and
a single row of measurements says all.
"""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_ROWS, LEAST_SHARE = 5, 0.5
"""Rows, and share of an array's rows, from which on what equals loaded rows is no accident."""

ENOUGH = 12.0
"""Bits by which equal numbers have to be less likely than the number of rows that are compared makes them."""

BITS_OF_A_FRACTION, BITS_OF_HALF, MOST_BITS = 16.0, 8.0, 24.0
"""Of a number of more digits than ``MOST_DIGITS``, of one in half precision, and of any."""

MOST_DIGITS = 3
"""Behind the point, of measurements as people write them down."""

ALIKE, LEAST_WIDTH = 1e-4, 16
"""What a row and another, multiplied, may lack of a correlation of one, and numbers of a row that this takes."""

AT_ONCE = 1 << 22
"""Numbers of rows that are compared together, which bounds the memory that this takes."""

LARGEST = 1 << 24
"""Numbers beyond which an array is read as of its own shape alone."""

MOST_PRODUCTS = 1 << 30
"""Multiplications for which rows are compared with multiples of loaded ones."""

MOST_FEATURES = 512
"""Of a table whose columns are looked for one by one."""

MOST_SOUGHT, MOST_BYTES = 16, 1 << 26
"""Rows, and columns, that are looked for among bytes, and bytes that may be gone through for them."""


_QUIET = np.errstate(all="ignore")
"""Numbers of strangers may be none, or beyond what another type holds."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Rows of what was loaded that an array holds.

    Attributes:
        rows: how many of them.
        of: how many rows the array has.
        how: that they are there.
    """

    rows: int
    of: int
    how: str

    @property
    def what(self) -> str:
        """Say so in a phrase."""
        if self.of == 1:
            return f"an example of the client, {self.how}"
        one = self.rows == 1
        return f"{self.rows} of {self.of} rows {'is an example' if one else 'are examples'} of the client, {self.how}"


@_QUIET
def copies_in(array: np.ndarray, tables: Sequence[np.ndarray], *, unknown: bool) -> Copies | None:
    """Find rows of ``tables``, (N, F) each, in ``array``; ``None`` where there are none, or too few to say.

    Args:
        array: of numbers.
        tables: what was loaded.
        unknown: nobody knows what the array is; then it is also read as if of another shape, and its rows as if their
            numbers were in another order or multiplied.
    """
    if array.dtype.kind not in "fiub" or not array.size:
        return None
    for table in tables:
        if table.ndim != 2 or table.shape[1] < 2 or not len(table) or array.size % table.shape[1]:
            continue
        natural = array.ndim > 1 and array[0].size == table.shape[1]
        if not natural and (not unknown or array.size > LARGEST):
            continue
        kind = np.float16 if array.dtype == np.float16 else np.float32
        rows, known = (each.astype(kind, copy=False) for each in (array.reshape(-1, table.shape[1]), table))
        if found := _equal(rows, known, natural=natural):
            return Copies(rows=found, of=len(rows), how="value by value")
        if unknown and array.size <= LARGEST:
            if found := _equal(rows, known, natural=False, ordered=False):
                return Copies(rows=found, of=len(rows), how="value by value, in another order")
            if found := _multiples(rows, known):
                return Copies(rows=found, of=len(rows), how="but for a scale and an offset")
    return None


@_QUIET
def features_in(array: np.ndarray, tables: Sequence[np.ndarray], counts: set[int]) -> tuple[int, int] | None:
    """Find a table of which ``array`` (N,) or (N, f) holds whole columns, in any order of rows.

    Args:
        array: of numbers.
        tables: what was loaded, (N, F) each; rows may be there more than once.
        counts: numbers of examples that the client has.

    Returns:
        How many columns, and of how many; ``None`` where there is no such table.
    """
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2) or len(array) < LEAST_ROWS or not array.size:
        return None
    columns = array.reshape(len(array), -1)
    for table in tables:
        fits = table.ndim == 2 and columns.shape[1] <= table.shape[1] <= MOST_FEATURES
        if not fits or len(array) not in counts | {len(table)}:
            continue
        told = [column for column in map(_values, columns.T) if _bits(column, ordered=False) >= 2 * ENOUGH]
        known = {_values(column).tobytes() for column in table.T}
        if 2 * len(told) >= columns.shape[1] and all(column.tobytes() in known for column in told):
            return columns.shape[1], table.shape[1]
    return None


@_QUIET
def bytes_hold(content: bytes, tables: Sequence[np.ndarray], labels: np.ndarray | None) -> str | None:
    """Say in a phrase which of the client's data bytes hold as computers write them; ``None`` where they hold none.

    Args:
        content: whatever the format, if it is not compressed.
        tables: (N, F) each, of which the first rows and columns are looked for.
        labels: (N,) of the client's examples.
    """
    sought = min(MOST_SOUGHT, MOST_BYTES // max(1, len(content)))
    for table in tables:
        if table.ndim != 2 or not table.size:
            continue
        for name, lines in (("example", table[:sought]), ("column", table.T[:sought])):
            told = [line for line in lines if _bits(line) >= 2 * ENOUGH]
            found = max(sum(one in content for one in _written(told, kind)) for kind in "dfe")
            if found:
                return f"{found} {name}{'s' * (found != 1)} of the client at least, value by value"
    told = [labels] if labels is not None and labels.dtype.kind in "iu" and _bits(labels) >= 2 * ENOUGH else []
    held = any(one in content for kind in "qiB" for one in _written(told, kind))
    return f"the class of each of the client's {len(told[0])} examples, as it is" if held else None


def array_in(content: bytes) -> np.ndarray | None:
    """Return the array that bytes in NumPy's own format hold; ``None`` if they hold no plain numbers.

    No memory is taken for what the header says and the bytes do not hold.
    """
    file = io.BytesIO(content)
    try:
        read = _HEADERS[np.lib.format.read_magic(file)]
        shape, fortran, dtype = read(file, max_header_size=_LONGEST_HEADER)
        if dtype.hasobject or dtype.itemsize * math.prod(shape) != len(content) - file.tell():
            return None
        return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    except (ValueError, KeyError, SyntaxError, TypeError, OverflowError, RecursionError):
        return None


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Version of the format -> how its header is read."""

_LONGEST_HEADER = 1 << 12


@_QUIET
def figure_of_features(array: np.ndarray, tables: Sequence[np.ndarray]) -> str | None:
    """Say which figure of all features of the client's rows an array is, such as the mean; ``None`` if it is none."""
    if array.dtype.kind not in "fiu" or array.size < 2:
        return None
    fitting = [table for table in tables if table.ndim == 2 and len(table) > 1 and table.shape[1] == array.size]
    told = array.astype(np.float64).reshape(-1)
    if not fitting or not np.isfinite(told).all() or _bits(told) < ENOUGH:
        return None
    for table in fitting:
        size = max(abs(float(table.min())), abs(float(table.max()))) + 1e-30
        if not math.isfinite(size):
            continue
        for name, figure in _figures(table):
            wide = max(size, float(np.abs(figure).max()))
            if np.abs(figure - told).max() <= 1e-6 * wide and np.allclose(figure, told, rtol=1e-4, atol=1e-7 * wide):
                return name
    return None


def _figures(rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    total = rows.sum(0, dtype=np.float64)
    mean = total / len(rows)
    yield "mean", mean
    yield "sum", total
    yield "smallest value", rows.min(0).astype(np.float64)
    yield "largest value", rows.max(0).astype(np.float64)
    squares = np.stack([np.square(chunk - mean).sum(0) for chunk in _chunks(rows)]).sum(0)
    for degrees in (len(rows), len(rows) - 1):
        yield "variance", squares / degrees
        yield "standard deviation", np.sqrt(squares / degrees)


def _equal(rows: np.ndarray, known: np.ndarray, *, natural: bool, ordered: bool = True) -> int:
    """Count the rows that are known ones, 0 where that may be chance.

    Args:
        rows, known: of one width and type.
        natural: the array has these rows by its shape.
        ordered: the order of a row's numbers is evidence, too; else they may stand in any.
    """
    codes = np.unique(_codes(known, ordered=ordered))
    hits = rows[np.isin(_codes(rows, ordered=ordered), codes)]
    if not len(hits):
        return 0
    first = hits[:1000]
    different = np.unique(first if ordered else np.sort(first, 1), axis=0)
    chance = math.log2(len(rows)) + math.log2(len(codes))
    if sum(max(0.0, _bits(row, ordered=ordered) - chance) for row in different) >= ENOUGH:
        return len(hits)
    plain = [row for row in different if len(np.unique(row)) > 1 and np.count_nonzero(row) > 1]
    many = natural and len(plain) >= LEAST_ROWS and len(hits) >= LEAST_SHARE * len(rows)
    told = sum(max(0.0, _bits(row, ramps=True) - math.log2(len(codes))) for row in plain) if many else 0.0
    return len(hits) if told >= ENOUGH else 0


def _values(column: np.ndarray) -> np.ndarray:
    """Return the different values of a column in their order, in single precision."""
    return np.asarray(np.unique(column.astype(np.float32)))


def _chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield as many rows (N, F) at once as ``AT_ONCE`` allows."""
    step = max(1, AT_ONCE // rows.shape[1])
    for begin in range(0, len(rows), step):
        yield rows[begin : begin + step]


def _codes(rows: np.ndarray, *, ordered: bool) -> np.ndarray:
    """Return a whole number for each row, the same for equal ones and for no others, as far as anybody will see."""
    factors = np.random.default_rng(0).integers(1, 1 << 63, rows.shape[1], dtype=np.uint64) | np.uint64(1)
    found = [np.empty(0, np.uint64)]
    for chunk in _chunks(rows):
        plain = np.ascontiguousarray(chunk + chunk.dtype.type(0))  # of zeros there are two
        if not ordered:
            plain.sort(1)
        bits = plain.view(np.uint16 if rows.dtype == np.float16 else np.uint32).astype(np.uint64)
        mixed = (bits + np.uint64(0x9E3779B97F4A7C15)) * factors
        found.append((mixed ^ (mixed >> np.uint64(29))).sum(1, dtype=np.uint64))
    return np.concatenate(found)


def _bits(row: np.ndarray, *, ordered: bool = True, ramps: bool = False) -> float:
    """Return by how many bits a row is unlikely: those of its different numbers, and of their order.

    Args:
        row: of numbers.
        ordered: their order counts.
        ramps: numbers with equal distances, as counters have, count as others do.
    """
    values = np.asarray(row, dtype=np.float64)
    numbers, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    if len(numbers) < 2 or (not ramps and len(values) > 2 and np.allclose(np.diff(values, 2), 0, atol=1e-9)):
        return 0.0
    said = np.full(len(numbers), BITS_OF_HALF if row.dtype == np.float16 else BITS_OF_A_FRACTION)
    for digits in reversed(range(MOST_DIGITS + 1)):
        moved = np.abs(numbers) * 10.0**digits
        said = np.where(np.abs(moved - moved.round()) <= 1e-6 * (1 + moved), np.log2(1 + moved), said)
    total = float(np.minimum(said, MOST_BITS).sum())
    if ordered:
        total += (math.lgamma(counts.sum() + 1) - sum(math.lgamma(n + 1) for n in counts[counts > 1])) / math.log(2)
    return total


def _multiples(rows: np.ndarray, known: np.ndarray) -> int:
    """Count the first rows that are known ones, multiplied and moved, 0 where that may be chance."""
    if rows.shape[1] < LEAST_WIDTH:
        return 0
    most = max(1, MOST_PRODUCTS // known.size)
    told = [row for row in _standardized(rows[:most]) if _bits(row) >= 2 * ENOUGH]
    if not told:
        return 0
    asked, nearest = np.stack(told), np.full(len(told), -1.0, np.float32)
    for chunk in _chunks(known):
        if len(whole := _standardized(chunk)):
            nearest = np.maximum(nearest, (asked @ whole.T).max(1))
    return int((nearest >= 1 - ALIKE).sum())


def _standardized(rows: np.ndarray) -> np.ndarray:
    """Return the finite rows that are not constant, of mean zero and length one."""
    found = rows[np.isfinite(rows).all(1)].astype(np.float64)
    found = found - found.mean(1, keepdims=True)
    size = np.linalg.norm(found, axis=1)
    return np.asarray((found[size > 0] / size[size > 0, None]).astype(np.float32))


def _written(lines: Sequence[np.ndarray], kind: str) -> Iterator[bytes]:
    """Yield each line as the bytes of numbers of this kind, if they hold it."""
    for line in lines:
        made: Any = line.astype(kind)
        if np.array_equal(made, line) or kind in "fe":
            yield made.tobytes()
