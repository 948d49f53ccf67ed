"""Find client data in the clear by comparing a reply with the loaded data, without any attack."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_privacy.auditing.clear_text.copies import (
    LEAST_ROWS,
    LEAST_SHARE,
    array_in,
    bytes_hold,
    copies_in,
    entries_of_classes,
    features_in,
    figure_of_features,
    numbers_in,
)
from fl_privacy.auditing.clear_text.inventory import Sent, key_of
from fl_privacy.files import shipped
from fl_privacy.report.audit_parts import Leak

LEAST_DISTINCT = 4  # smallest number of different values for which equality is evidence

LEAST_STATISTIC, LARGEST_STATISTIC, DIGITS = 1e-6, 1e300, 3
"""Range of numbers that are compared with statistics of columns, and largest number of digits of settings and shares,
which count as statistics of a column only by their key."""

MOST_TEXTS, LONG_TEXT = 100, 200
"""Largest number of texts of a list that are checked, and smallest length of one that is reported as possible data."""

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]{2,}")
_PATH = re.compile(r"(?:^|[\s\"'=])(?:/(?:home|Users|root|data|mnt|tmp|var)/|[A-Z]:\\)[^\s\"']*")
_PICKLES, _ZIP, _NUMPY = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), b"PK\x03\x04", b"\x93NUMPY"
_KEY = "-----BEGIN PUBLIC KEY"
_EXAMPLE_COUNTS = re.compile(r"num[-_]?(examples|samples|rows|data)", re.IGNORECASE)
_LABELS = re.compile(r"label|target|class|truth|species|diagnos|outcome|^y(_|\b)", re.IGNORECASE)
_FIGURE = re.compile(r"mean|average|avg|sum|total|squares?|std|dev|variance", re.IGNORECASE)
_STATED = re.compile(r"epsilon|delta|noise[-_]?multiplier|max[-_]?grad[-_]?norm|clip", re.IGNORECASE)


_KINDS: Mapping[str, Mapping[str, Any]] = shipped(__file__, "kinds.yaml")
"""Kind of leak -> severity, what is found, and consequence for the people behind the data."""


def leak_of(kind: str, where: str, *found: object) -> Leak:
    """Build a leak of ``kind``, a key of ``kinds.yaml``, in the reply's entry ``where``; ``found`` fills its text."""
    known = _KINDS[kind]
    what = known["found"].format(*found)
    return Leak(severity=known["severity"], what=what, where=where, why=known["consequence"])


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The data that a client was observed to load.

    ``rows``: tables (N, F), a row for each example. ``columns``: table columns by name. ``labels``: (N,). ``examples``:
    their number; 0 if unknown.
    """

    rows: Sequence[np.ndarray] = ()
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    labels: np.ndarray | None = None
    examples: int = 0


def findings_of(sent: Sent, loaded: Loaded, unknown: Sequence[str], *, trained: bool) -> list[Leak]:
    """List the leaks in the clear that a reply has, by comparing it with the data that the client ``loaded``.

    ``unknown``: arrays, by record/key, that are neither trained parameters nor in the server's message. ``trained``:
    ``True`` if PyTorch modules were observed in training.
    """
    found: list[Leak] = []
    said = [v for at, v in sent.values.items() if _EXAMPLE_COUNTS.search(key_of(at)) and isinstance(v, int | float)]
    counts = {int(v) for v in [*said, loaded.examples] if LEAST_ROWS <= v < math.inf}
    for where, array in sent.arrays.items():
        here = list(_of_array(array, where, loaded, counts, unknown=where in unknown))
        if not here and where in unknown and array.ndim and len(array) in counts:
            entry = "one number" if array.size == len(array) else f"one vector of {array[0].size} numbers"
            here = [leak_of("each", where, entry, len(array))]
        elif not here and where in unknown and trained:
            here = [leak_of("array", where)]
        found += here
    for where, value in sent.values.items():
        found += _of_value(value, where, loaded)
    for record in dict.fromkeys(where.partition("/")[0] for where in sent.values):  # as in ``class_0`` and ``class_1``
        within = {key_of(where): v for where, v in sent.values.items() if where.startswith(f"{record}/")}
        entries = {key: value for key, value in within.items() if not _EXAMPLE_COUNTS.search(key)}
        if loaded.labels is not None and (keys := entries_of_classes(entries, loaded.labels)):
            found.append(leak_of("classes", f"{record}/{', '.join(keys)}"))
    return found


def _of_array(array: np.ndarray, where: str, loaded: Loaded, counts: set[int], *, unknown: bool) -> Iterator[Leak]:
    if array.dtype.kind in "SU":
        for text in array.reshape(-1)[:MOST_TEXTS].tolist():
            yield from _of_text(text if isinstance(text, str) else text.decode("utf-8", "replace"), where)
        return
    if (copies := copies_in(array, loaded.rows, unknown=unknown)) is not None:
        yield leak_of("rows", where, copies)
    elif _is_labels(array, where, loaded):
        yield leak_of("labels", where, array.size)
    elif array.dtype == np.uint8 and array.ndim == 1:
        yield from _of_bytes(array.tobytes(), where, loaded)
    elif (column := _equal_column(array, loaded, counts)) is not None:
        yield leak_of("column", where, column, array.size)
    elif unknown and (features := features_in(array, loaded.rows, counts)) is not None:
        what = f"the values of {features[0]} of {features[1]} features of the client's {len(array)} examples"
        yield leak_of("rows", where, what)
    elif _is_class_count(array, loaded):
        yield leak_of("classes", where)
    elif (figure := figure_of_features(array, loaded.rows)) is not None:
        yield leak_of("figure", where, figure, array.size)
    elif array.ndim == 1 and _is_histogram(array, loaded):
        yield leak_of("histogram", where, int(array.sum()))


def _is_labels(array: np.ndarray, where: str, loaded: Loaded) -> bool:
    """Return whether ``array`` holds the classes of all examples that the client ``loaded``, in any order.

    Two classes may agree by chance; the order must then agree, too, unless the entry's name ``where`` suggests labels.
    """
    labels = loaded.labels
    if labels is None or array.dtype.kind not in "fiub":
        return False
    if not LEAST_ROWS <= array.size == len(labels) == max(array.shape):
        return False
    values = np.sort(array.reshape(-1))
    if values[0] == values[-1] or not np.array_equal(values, np.sort(labels)):
        return False
    named = _LABELS.search(key_of(where)) is not None
    return named or len(np.unique(values)) > 2 or bool(np.array_equal(array.reshape(-1), labels))


def _of_value(value: Any, where: str, loaded: Loaded) -> Iterator[Leak]:
    key = key_of(where)
    if isinstance(value, bytes):
        yield from _of_bytes(value, where, loaded)
    elif isinstance(value, str):
        yield from _of_text(value, where)
        yield from _of_numbers(numbers_in(value), where, loaded)
    elif isinstance(value, list) and value and not isinstance(value[0], str | bytes):
        yield from _of_numbers(np.asarray(value), where, loaded)
    elif isinstance(value, list):
        for text in value[:MOST_TEXTS]:
            yield from _of_text(text, where) if isinstance(text, str) else _of_bytes(text, where, loaded)
    elif (statistic := _statistic(value, key, loaded)) is not None:
        yield leak_of("statistic", where, *statistic)
    elif _EXAMPLE_COUNTS.search(key) and isinstance(value, int | float) and 0 < value < 2:
        what, seen = f"the client says that it has {value:g} example{'s' * (value != 1)}", loaded.examples
        why = "An update of a single example is the worst case: the whole upload is about one person."
        if value != seen:
            has = f"it was seen to load {seen} for training" if seen else "nothing that it was seen to load says so"
            what = f"{what}, but {has}: perhaps a placeholder"
            why = "Where the number is right, the whole upload is about one person; else the app fills in one."
        yield Leak(severity="facts" if value == seen else "look", what=what, where=where, why=why)


def _of_numbers(array: np.ndarray, where: str, loaded: Loaded) -> list[Leak]:
    found = list(_of_array(array, where, loaded, {loaded.examples}, unknown=True))
    scores = not found and 1 < len(array) == loaded.examples
    return [leak_of("scores", where, len(array))] if scores else found


def stated_privacy(sent: Sent) -> dict[str, float]:
    """Return the numbers in a reply that state differential privacy, such as epsilon, by key."""
    return {
        key: float(value)
        for key, value in ((key_of(where), value) for where, value in sent.values.items())
        if _STATED.search(key) and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _of_bytes(content: bytes, where: str, loaded: Loaded) -> Iterator[Leak]:
    if content.startswith(_NUMPY) and (array := array_in(content)) is not None:
        if array.dtype != np.uint8 or array.ndim != 1:  # otherwise bytes might nest without end
            yield from _of_array(array, where, loaded, {loaded.examples}, unknown=True)
        return
    plain = [column[:, None] for column in loaded.columns.values() if column.ndim == 1 and column.dtype.kind in "fiu"]
    if (held := bytes_hold(content, [*loaded.rows, *plain], loaded.labels)) is not None:
        yield leak_of("rows", where, f"{len(content)} bytes that hold {held}")
    if content.startswith(_PICKLES):
        yield leak_of("pickle", where, len(content))
    elif content.startswith(_ZIP):
        yield leak_of("archive", where, len(content))
    elif content.lstrip()[:1] == b"{" and b'"split_conditions"' in content:
        yield leak_of("trees", where)
    elif content.lstrip()[:1] == b"{" and b'"oblivious_trees"' in content:
        yield leak_of("other trees", where)
    elif content.startswith(_NUMPY):
        yield leak_of("objects", where, len(content))
    else:
        head = content[:1000]
        if head and sum(32 <= byte < 127 or byte in (9, 10, 13) for byte in head) > 0.95 * len(head):
            yield from _of_text(content[:100_000].decode("utf-8", "replace"), where)


def _of_text(text: str, where: str) -> Iterator[Leak]:
    for kind, pattern in (("e-mail", _EMAIL), ("path", _PATH)):
        if match := pattern.search(text):
            letters = match.group().strip()
            yield leak_of(kind, where, letters[:2], len(letters))
    if len(text) >= LONG_TEXT:
        word = not any(letter.isspace() for letter in text.strip())
        kind = "key" if text.lstrip().startswith(_KEY) else "word" if word else "text"
        yield leak_of(kind, where, len(text))


def _equal_column(array: np.ndarray, loaded: Loaded, counts: set[int]) -> str | None:
    if array.dtype.kind not in "fiu" or array.size < LEAST_ROWS or max(array.shape) != array.size:
        return None
    values = np.asarray(array, dtype=np.float64).reshape(-1)
    distinct = np.unique(values)
    if len(distinct) < LEAST_DISTINCT or (len(distinct) == len(values) and not np.diff(distinct, 2).any()):
        return None  # a consecutive count is in any column with these numbers
    for name, column in loaded.columns.items():
        enough = len(values) in counts or len(values) >= LEAST_SHARE * len(column)
        if column.dtype.kind in "fiu" and enough and bool(np.isin(distinct, column.astype(np.float64)).all()):
            return name
    return None


def _is_class_count(array: np.ndarray, loaded: Loaded) -> bool:
    labels = loaded.labels
    if labels is None or len(labels) < LEAST_ROWS or array.ndim != 1 or array.dtype.kind not in "fiu" or len(array) < 2:
        return False
    if labels.dtype.kind not in "iu" or int(labels.max()) >= len(array):  # a large label would enlarge the counts
        return False
    counts = np.bincount(labels.clip(min=0), minlength=len(array)).astype(np.float64)
    equal = np.array_equal(counts, array) or np.allclose(counts / counts.sum(), array, rtol=1e-5, atol=1e-7)
    return bool(equal) and len(np.unique(counts)) > 1


def _statistic(value: Any, key: str, loaded: Loaded) -> tuple[str, str, int] | None:
    """Find a statistic of loaded data that equals ``value`` (reply's ``key``): (name, column, number of examples)."""
    usual = type(value) in (int, float) and LEAST_STATISTIC <= abs(value) < LARGEST_STATISTIC
    if not usual or _EXAMPLE_COUNTS.search(key):
        return None
    plain = value == float(f"{value:.{DIGITS}g}") and not _FIGURE.search(key)
    for name, column in loaded.columns.items():
        varies = column.dtype.kind in "fiu" and len(column) > 1 and column.min() != column.max()
        if not varies or (plain and name.lower() not in key.lower()):
            continue
        values = column.astype(np.float64)
        figures = {
            "sum": values.sum(),
            "mean": values.mean(),
            "sum of squares": np.square(values).sum(),
            "standard deviation": values.std(ddof=1),
        }
        fitting = (figure for figure, number in figures.items() if abs(number - value) <= 1e-9 * abs(value))
        if (figure := next(fitting, None)) is not None:
            return figure, name, len(column)
    return None


def _is_histogram(array: np.ndarray, loaded: Loaded) -> bool:
    if array.dtype.kind not in "iu" or len(array) < LEAST_DISTINCT or (array < 0).any():
        return False
    if len(array) == loaded.examples or not np.diff(array.astype(np.float64), 2).any():
        return False
    total = int(array.sum())
    return total >= LEAST_ROWS and any(total == len(column) for column in loaded.columns.values())
