"""Copies of a client's examples in its replies: unchanged, reshaped, reordered, scaled, among bytes, or as text."""

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fl_privacy.files.foreign import DAMAGED

LEAST_ROWS, LEAST_SHARE = 5, 0.5
"""Smallest number and share of an array's rows whose equality with loaded rows is no accident."""

ENOUGH = 12.0  # bits by which equal numbers must be less likely than by chance among the compared rows

BITS_OF_A_FRACTION, BITS_OF_HALF, MOST_BITS, MOST_DIGITS = 16.0, 8.0, 24.0, 3
"""Improbability in bits of numbers with over ``MOST_DIGITS`` decimals, in half precision, and of any at most."""

ALIKE, LEAST_WIDTH = 1e-4, 16
"""Tolerance on the correlation of a row with its scaled copy, and smallest number of columns of such rows."""

AT_ONCE, LARGEST, MOST_PRODUCTS = 1 << 22, 1 << 24, 1 << 30
"""Numbers compared at once, size of an array that is also compared in other shapes, and largest number of
multiplications in a comparison with multiples of loaded rows."""

MOST_FEATURES, MOST_SOUGHT, MOST_BYTES = 512, 16, 1 << 26
"""Largest numbers of columns searched one by one, of rows or columns searched among bytes, and of bytes searched."""

MOST_LETTERS, MOST_NESTED, MOST_KEYS = 200_000, 4, 8
"""Largest length of a text searched for numbers, depth of its nested lists, and number of named keys."""

_NUMBERS = re.compile(r"[\s\d.,;:|\[\](){}+eE-]+")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_QUIET = np.errstate(all="ignore")  # untrusted numbers may be NaN, or overflow another type


@_QUIET
def copies_in(array: np.ndarray, tables: Sequence[np.ndarray], *, unknown: bool) -> str | None:
    """Return a phrase on how many rows of client data ``array`` holds; ``None`` if none, or if chance explains them.

    ``tables``: the client's data, N rows of F features each, (N, F). ``unknown=True`` also compares the array in other
    shapes, in another order of values in a row, or scaled.
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
            return _copies(found, len(rows), "value by value")
        if unknown and array.size <= LARGEST:
            if found := _equal(rows, known, natural=False, ordered=False):
                return _copies(found, len(rows), "value by value, in another order")
            if found := _multiples(rows, known):
                return _copies(found, len(rows), "but for a scale and an offset")
    return None


def _copies(rows: int, of: int, how: str) -> str:
    many = f"{rows} of {of} rows {'is an example' if rows == 1 else 'are examples'} of the client"
    return f"{'an example of the client' if of == 1 else many}, {how}"


@_QUIET
def features_in(array: np.ndarray, tables: Sequence[np.ndarray], counts: set[int]) -> tuple[int, int] | None:
    """Return how many columns ``array``, (N,) or (N, f), has, and how many the table has that contains all of them.

    Values of a column may be repeated and in any order; columns with too few different values do not count. ``None`` if
    no table of ``tables`` (N, F) fits. ``counts``: possible numbers N of examples.
    """
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2) or len(array) < LEAST_ROWS or not array.size:
        return None
    columns = array.reshape(len(array), -1)
    for table in tables:
        fits = table.ndim == 2 and columns.shape[1] <= table.shape[1] <= MOST_FEATURES
        if not fits or len(array) not in counts | {len(table)}:
            continue
        columns_hit = [column for column in map(_values, columns.T) if _bits(column, ordered=False) >= 2 * ENOUGH]
        known = {_values(column).tobytes() for column in table.T}
        if 2 * len(columns_hit) >= columns.shape[1] and all(column.tobytes() in known for column in columns_hit):
            return columns.shape[1], table.shape[1]
    return None


@_QUIET
def bytes_hold(content: bytes, tables: Sequence[np.ndarray], labels: np.ndarray | None) -> str | None:
    """Return a phrase on client data that the bytes ``content`` hold as uncompressed numbers, or ``None``.

    The first rows and columns of ``tables`` (N, F), and ``labels`` (N,), are searched for.
    """
    sought = min(MOST_SOUGHT, MOST_BYTES // max(1, len(content)))
    for table in tables:
        if table.ndim != 2 or not table.size:
            continue
        for name, lines in (("example", table[:sought]), ("column", table.T[:sought])):
            telling = [line for line in lines if _bits(line) >= 2 * ENOUGH]
            if found := max(sum(one in content for one in _written(telling, kind)) for kind in "dfe"):
                return f"{found} {name}{'s' * (found != 1)} of the client at least, value by value"
    telling = [labels] if labels is not None and labels.dtype.kind in "iu" and _bits(labels) >= 2 * ENOUGH else []
    held = any(one in content for kind in "qiB" for one in _written(telling, kind))
    return f"the class of each of the client's {len(telling[0])} examples, as it is" if held else None


def array_in(content: bytes) -> np.ndarray | None:
    """Return the array in bytes of NumPy's format; ``None`` for other bytes, or for an array of Python objects."""
    file = io.BytesIO(content)
    try:
        shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file, max_header_size=1 << 12)
        if dtype.hasobject or dtype.itemsize * math.prod(shape) != len(content) - file.tell():
            return None
        return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    except DAMAGED:
        return None


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Version of the format -> header parser."""


@_QUIET
def figure_of_features(array: np.ndarray, tables: Sequence[np.ndarray]) -> str | None:
    """Return which statistic of a table's columns, such as the mean, equals ``array``; ``None`` if there is none."""
    if array.dtype.kind not in "fiu" or array.size < 2:
        return None
    fitting = [table for table in tables if table.ndim == 2 and len(table) > 1 and table.shape[1] == array.size]
    flat = array.astype(np.float64).reshape(-1)
    if not fitting or not np.isfinite(flat).all() or _bits(flat) < ENOUGH:
        return None
    for table in fitting:
        size = max(abs(float(table.min())), abs(float(table.max()))) + 1e-30
        if not math.isfinite(size):
            continue
        for name, figure in _figures(table):
            wide = max(size, float(np.abs(figure).max()))
            if np.abs(figure - flat).max() <= 1e-6 * wide and np.allclose(figure, flat, rtol=1e-4, atol=1e-7 * wide):
                return name
    return None


def _figures(rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    total = rows.sum(0, dtype=np.float64)
    yield "mean", (mean := total / len(rows))
    yield "sum", total
    yield "smallest value", rows.min(0).astype(np.float64)
    yield "largest value", rows.max(0).astype(np.float64)
    squares = np.stack([np.square(chunk - mean).sum(0) for chunk in _chunks(rows)]).sum(0)
    for degrees in (len(rows), len(rows) - 1):
        yield "variance", squares / degrees
        yield "standard deviation", np.sqrt(squares / degrees)


def _equal(rows: np.ndarray, known: np.ndarray, *, natural: bool, ordered: bool = True) -> int:
    """Count the ``rows`` that equal a row of the client's data (``known``); 0 if that may be chance.

    ``ordered=False`` ignores the order of values in a row. ``natural``: ``True`` if the array was not reshaped to rows;
    many matches of short numbers then count, too.
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
    bits = sum(max(0.0, _bits(row, ramps=True) - math.log2(len(codes))) for row in plain) if many else 0.0
    return len(hits) if bits >= ENOUGH else 0


def _values(column: np.ndarray) -> np.ndarray:
    return np.asarray(np.unique(column.astype(np.float32)))


def _chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, AT_ONCE // rows.shape[1])
    for begin in range(0, len(rows), step):
        yield rows[begin : begin + step]


def _codes(rows: np.ndarray, *, ordered: bool) -> np.ndarray:
    factors = np.random.default_rng(0).integers(1, 1 << 63, rows.shape[1], dtype=np.uint64) | np.uint64(1)
    found = [np.empty(0, np.uint64)]
    for chunk in _chunks(rows):
        plain = np.ascontiguousarray(chunk + chunk.dtype.type(0))  # turns -0 into 0
        if not ordered:
            plain.sort(1)
        bits = plain.view(np.uint16 if rows.dtype == np.float16 else np.uint32).astype(np.uint64)
        mixed = (bits + np.uint64(0x9E3779B97F4A7C15)) * factors
        found.append((mixed ^ (mixed >> np.uint64(29))).sum(1, dtype=np.uint64))
    return np.concatenate(found)


def _bits(row: np.ndarray, *, ordered: bool = True, ramps: bool = False) -> float:
    """Return the bits of evidence that a match of ``row`` is no coincidence.

    Digits of values are evidence and, if ``ordered``, their order. Evenly spaced values give 0 bits unless ``ramps``.
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
    """Count how many of the first ``rows`` equal a row of ``known`` up to scale and offset; 0 if it may be chance."""
    first = rows[: max(1, MOST_PRODUCTS // known.size)] if rows.shape[1] >= LEAST_WIDTH else rows[:0]
    telling = [row for row in _standardized(first) if _bits(row) >= 2 * ENOUGH]
    if not telling:
        return 0
    asked, nearest = np.stack(telling), np.full(len(telling), -1.0, np.float32)
    for chunk in _chunks(known):
        if len(whole := _standardized(chunk)):
            nearest = np.maximum(nearest, (asked @ whole.T).max(1))
    return int((nearest >= 1 - ALIKE).sum())


def _standardized(rows: np.ndarray) -> np.ndarray:
    found = rows[np.isfinite(rows).all(1)].astype(np.float64)
    found = found - found.mean(1, keepdims=True)
    size = np.linalg.norm(found, axis=1)
    return np.asarray((found[size > 0] / size[size > 0, None]).astype(np.float32))


def _written(lines: Sequence[np.ndarray], kind: str) -> Iterator[bytes]:
    for line in lines:
        made: Any = line.astype(kind)
        if np.array_equal(made, line) or kind in "fe":
            yield made.tobytes()


def numbers_in(text: str) -> np.ndarray:
    """Return the numbers (N,) in a text of numbers, or in a JSON list or object; empty for other or too long texts."""
    if len(text) > MOST_LETTERS or not any(letter.isdigit() for letter in text[:1000]):
        return np.zeros(0)
    try:
        said = json.loads(text)
        said = list(said.values()) if isinstance(said, dict) else said
    except (ValueError, RecursionError):
        said = [float(one) for one in _NUMBER.findall(text)] if _NUMBERS.fullmatch(text) else []
    for _ in range(MOST_NESTED):
        if isinstance(said, list) and said and all(isinstance(one, list | dict) for one in said):
            said = [each for one in said for each in (one.values() if isinstance(one, dict) else one)]
    try:
        if not isinstance(said, list) or len(said) < 2 or not all(type(one) in (int, float) for one in said):
            return np.zeros(0)
        found = np.asarray(said, dtype=np.float64)
    except OverflowError:
        return np.zeros(0)
    whole = np.isfinite(found).all() and bool((np.abs(found) < 2**53).all()) and bool((found == found.round()).all())
    return found.astype(np.int64) if whole else found


def entries_of_classes(values: Mapping[str, Any], labels: np.ndarray) -> tuple[str, ...]:
    """Return the keys in ``values`` whose numbers are the class counts of ``labels`` (N,), or the classes' shares."""
    if labels.dtype.kind not in "iu" or not len(labels) or labels.min() < 0 or labels.max() > len(labels) + 1000:
        return ()
    counts = np.bincount(labels)
    there = np.sort(counts[counts > 0])
    if len(np.unique(there)) < 2:
        return ()
    groups: dict[str, list[str]] = defaultdict(list)
    for key, value in values.items():
        if type(value) in (int, float) and abs(value) < 2**53:
            groups[re.sub(r"\d+", "#", key)].append(key)
            groups[""].append(key)
    for like, keys in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        numbers = np.array([float(values[key]) for key in keys])
        numbers = np.sort(numbers[numbers != 0])
        if len(numbers) != len(there) or (not like and len(numbers) < 3):  # two counts may be equal by chance
            continue
        if np.array_equal(numbers, there) or (like and np.allclose(numbers, there / len(labels), 1e-5)):
            shown = tuple(keys[:MOST_KEYS])
            return shown if len(keys) <= MOST_KEYS else (*shown, "...")
    return ()
