"""Client data in the clear, found by comparing a reply with the loaded data, without any attack."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
from fl_privacy.auditing.clear_text.inventory import Sent

Severity = Literal["data", "facts", "look"]
"""``data``: examples, or parts of them, in the clear; ``facts``: facts about the examples; ``look``: anything
that may hold data, or run code on arrival."""

LEAST_DISTINCT = 4
"""Smallest number of different values for which equality is evidence."""

LEAST_STATISTIC, LARGEST_STATISTIC = 1e-6, 1e300
"""Range of numbers that are compared with statistics of columns."""

DIGITS = 3
"""Largest number of digits of settings and shares, which count as statistics of a column only by their key."""

MOST_TEXTS = 100
"""Largest number of texts of a list that are checked."""

LONG_TEXT = 200
"""Smallest length of a text that is reported as possible data."""

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]{2,}")
_PATH = re.compile(r"(?:^|[\s\"'=])(?:/(?:home|Users|root|data|mnt|tmp|var)/|[A-Z]:\\)[^\s\"']*")
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_KEY = "-----BEGIN PUBLIC KEY"
_ZIP = b"PK\x03\x04"
_NUMPY = b"\x93NUMPY"

_EXAMPLE_COUNTS = re.compile(r"num[-_]?(examples|samples|rows|data)", re.IGNORECASE)
_LABELS = re.compile(r"label|target|class|truth|species|diagnos|outcome|^y(_|\b)", re.IGNORECASE)
_FIGURE = re.compile(r"mean|average|avg|sum|total|squares?|std|dev|variance", re.IGNORECASE)
_STATED = re.compile(r"epsilon|delta|noise[-_]?multiplier|max[-_]?grad[-_]?norm|clip", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Leak:
    """One thing that a reply leaks in the clear.

    Attributes:
        why: consequence for the people behind the data, a sentence.
    """

    severity: Severity
    what: str
    where: str
    why: str

    def at(self, where: str) -> "Leak":
        return replace(self, where=where)


_UNKNOWN = Leak(
    severity="look",
    what="an array that is no parameter of what the client trained",
    where="",
    why="What it reveals is unknown; look at how the client makes it.",
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The data that a client was observed to load.

    Attributes:
        rows: (N, F) matrices of numbers, one row an example.
        examples: number of training examples; 0 if unknown.
    """

    rows: Sequence[np.ndarray] = ()
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    labels: np.ndarray | None = None
    examples: int = 0


def findings_of(sent: Sent, loaded: Loaded, unknown: Sequence[str], *, trained: bool) -> list[Leak]:
    """List the leaks of a reply in the clear.

    Args:
        unknown: names of arrays that are neither trained parameters nor like arrays sent.
        trained: ``True`` if PyTorch modules were observed in training.
    """
    found: list[Leak] = []
    told = [v for (_, key), v in sent.values.items() if _EXAMPLE_COUNTS.search(key) and isinstance(v, int | float)]
    counts = {int(v) for v in [*told, loaded.examples] if LEAST_ROWS <= v < math.inf}
    for (record, key), array in sent.arrays.items():
        where = f"{record}/{key}"
        here = list(_of_array(array, where, loaded, counts, unknown=key in unknown))
        if not here and key in unknown and array.ndim and len(array) in counts:
            here = [_of_each(array, where)]
        elif not here and key in unknown and trained:
            here = [_UNKNOWN.at(where)]
        found += here
    for (record, key), value in sent.values.items():
        found += _of_value(value, f"{record}/{key}", key, loaded)
    return found + list(counts_apart(sent.values, loaded.labels))


def _of_array(array: np.ndarray, where: str, loaded: Loaded, counts: set[int], *, unknown: bool) -> Iterator[Leak]:
    if array.dtype.kind in "SU":
        for text in array.reshape(-1)[:MOST_TEXTS].tolist():
            yield from _of_text(text if isinstance(text, str) else text.decode("utf-8", "replace"), where)
        return
    copies = copies_in(array, loaded.rows, unknown=unknown)
    if copies is not None:
        yield _raw_rows(copies.what, where)
    elif _is_labels(array, where, loaded):
        yield raw_labels(array.size, where)
    elif array.dtype == np.uint8 and array.ndim == 1:
        yield from _of_bytes(array.tobytes(), where, loaded)
    elif (column := _equal_column(array, loaded, counts)) is not None:
        yield _raw_column(column, array.size, where)
    elif unknown and (told := features_in(array, loaded.rows, counts)) is not None:
        yield _raw_rows(f"the values of {told[0]} of {told[1]} features of the client's {len(array)} examples", where)
    elif _is_class_count(array, loaded):
        yield _class_counts(where)
    elif (figure := figure_of_features(array, loaded.rows)) is not None:
        yield Leak(
            severity="facts",
            what=f"the {figure} of each of {array.size} features over the client's examples",
            where=where,
            why="For few examples such figures reveal the examples, and two of nearly the same people reveal the one"
            " who differs.",
        )
    elif array.ndim == 1 and _is_histogram(array, loaded):
        yield _histogram(array, where)


def _raw_rows(what: str, where: str) -> Leak:
    return Leak(
        severity="data",
        what=what,
        where=where,
        why="The receiver has these examples; no attack is needed.",
    )


def _histogram(array: np.ndarray, where: str) -> Leak:
    return Leak(
        severity="facts",
        what=f"a histogram of the client's {int(array.sum())} examples",
        where=where,
        why="Bins with few examples identify people, and it reveals how this client's data differ from others'.",
    )


def _of_each(array: np.ndarray, where: str) -> Leak:
    entry = "one number" if array.size == len(array) else f"one vector of {array[0].size} numbers"
    return Leak(
        severity="facts",
        what=f"{entry} for each of the client's {len(array)} examples",
        where=where,
        why="Values for single examples may be the data themselves, or enough to rebuild them; not attacked here.",
    )


def _is_labels(array: np.ndarray, where: str, loaded: Loaded) -> bool:
    """Return ``True`` for the classes of all examples; of two classes, order or name must decide."""
    labels = loaded.labels
    if labels is None or array.dtype.kind not in "fiub" or not LEAST_ROWS <= array.size == len(labels):
        return False
    if max(array.shape) != array.size:
        return False
    values = np.sort(array.reshape(-1))
    if values[0] == values[-1] or not np.array_equal(values, np.sort(labels)):
        return False
    named = _LABELS.search(where.rpartition("/")[2]) is not None
    return named or len(np.unique(values)) > 2 or bool(np.array_equal(array.reshape(-1), labels))


def raw_labels(number: int, where: str) -> Leak:
    """Report an array that holds the labels of all examples."""
    return Leak(
        severity="data",
        what=f"the class of each of the client's {number} examples, as it is",
        where=where,
        why="The receiver has the label of every example; no attack is needed.",
    )


def _raw_column(column: str, number: int, where: str) -> Leak:
    return Leak(
        severity="data",
        what=f"the values of the column {column} of {number} examples, as they are",
        where=where,
        why="The receiver has these values of every example; no attack is needed.",
    )


def _of_value(value: Any, where: str, key: str, loaded: Loaded) -> Iterator[Leak]:
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
    elif (told := _statistic(value, key, loaded)) is not None:
        yield Leak(
            severity="facts",
            what=f"the {told[0]} of the column {told[1]} over the client's {told[2]} examples",
            where=where,
            why="For few examples such figures reveal the examples, and two of nearly the same people reveal the one"
            " who differs.",
        )
    elif _EXAMPLE_COUNTS.search(key) and isinstance(value, int | float) and value < 2:
        yield _few_examples(float(value), loaded.examples, where)


def _of_numbers(array: np.ndarray, where: str, loaded: Loaded) -> Iterator[Leak]:
    if (copies := copies_in(array, loaded.rows, unknown=True)) is not None:
        yield _raw_rows(copies.what, where)
    elif _is_labels(array, where, loaded):
        yield raw_labels(array.size, where)
    elif (column := _equal_column(array, loaded, {loaded.examples})) is not None:
        yield _raw_column(column, len(array), where)
    elif _is_class_count(array, loaded):
        yield _class_counts(where)
    elif _is_histogram(array, loaded):
        yield _histogram(array, where)
    elif len(array) > 1 and len(array) == loaded.examples:
        yield Leak(
            severity="facts",
            what=f"a number for each of the client's {len(array)} examples",
            where=where,
            why="A loss or score of single examples says which of them a model was trained on.",
        )


def _few_examples(stated: float, seen: int, where: str) -> Leak:
    what = f"the client says that it has {stated:g} example{'s' * (stated != 1)}"
    if stated == seen:
        why = "An update of a single example is the worst case: the whole upload is about one person."
        return Leak(severity="facts", what=what, where=where, why=why)
    has = f"it was seen to load {seen} for training" if seen else "nothing that it was seen to load says so"
    why = "Where the number is right, the whole upload is about one person; else the app fills in one."
    return Leak(severity="look", what=f"{what}, but {has}: perhaps a placeholder", where=where, why=why)


def stated_privacy(sent: Sent) -> dict[str, float]:
    """Return a reply's figures of differential privacy by name."""
    return {
        key: float(value)
        for (_, key), value in sent.values.items()
        if _STATED.search(key) and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _of_bytes(content: bytes, where: str, loaded: Loaded) -> Iterator[Leak]:
    if content.startswith(_NUMPY) and (array := array_in(content)) is not None:
        if array.dtype != np.uint8 or array.ndim != 1:  # otherwise bytes might nest without end
            yield from _of_array(array, where, loaded, {loaded.examples}, unknown=True)
        return
    plain = [column[:, None] for column in loaded.columns.values() if column.ndim == 1 and column.dtype.kind in "fiu"]
    if (held := bytes_hold(content, [*loaded.rows, *plain], loaded.labels)) is not None:
        yield _raw_rows(f"{len(content)} bytes that hold {held}", where)
    if content.startswith(_PICKLES):
        yield Leak(
            severity="look",
            what=f"{len(content)} bytes in Python's pickle format",
            where=where,
            why="Unpickling them runs code, and they may hold any object of the client.",
        )
    elif content.startswith(_ZIP):
        yield Leak(
            severity="look",
            what=f"{len(content)} bytes of a ZIP archive, as torch.save writes",
            where=where,
            why="They may hold any object of the client.",
        )
    elif content.lstrip()[:1] == b"{" and (b'"split_conditions"' in content or b'"oblivious_trees"' in content):
        yield Leak(
            severity="facts",
            what="decision trees as text, with split values and sums over the examples of each leaf",
            where=where,
            why="Split values are values of examples, and sums over leaves count people."
            + ("" if b'"split_conditions"' in content else " Only XGBoost's trees are attacked here."),
        )
    elif content.startswith(_NUMPY):
        yield Leak(
            severity="look",
            what=f"{len(content)} bytes of an array of Python's objects",
            where=where,
            why="They are pickled: loading them runs code, and they may hold any object of the client.",
        )
    else:
        head = content[:1000]
        if head and sum(32 <= byte < 127 or byte in (9, 10, 13) for byte in head) > 0.95 * len(head):
            yield from _of_text(content[:100_000].decode("utf-8", "replace"), where)


def _of_text(text: str, where: str) -> Iterator[Leak]:
    for pattern, what, why in (
        (_EMAIL, "an e-mail address", "It names a person."),
        (_PATH, "a path of a file on the client", "It may name a person, and reveals how the client stores its data."),
    ):
        if match := pattern.search(text):
            letters = match.group().strip()
            yield Leak(
                severity="facts", what=f"{what} ({letters[:2]}… of {len(letters)} letters)", where=where, why=why
            )
    if len(text) >= LONG_TEXT:
        key, word = text.lstrip().startswith(_KEY), not any(letter.isspace() for letter in text.strip())
        what, why = "a text", "It may hold what a person wrote; look at how the client makes it."
        if key:
            what, why = "a public key", "Clients send such keys to agree on masks; they reveal nothing about data."
        elif word:
            what, why = "one word", "It is likely a code, or encrypted; look at how the client makes it."
        yield Leak(severity="look", what=f"{what} of {len(text)} letters", where=where, why=why)


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
    if len(np.unique(counts)) < 2:
        return False
    return bool(np.array_equal(counts, array)) or bool(np.allclose(counts / counts.sum(), array, rtol=1e-5, atol=1e-7))


def _statistic(value: Any, key: str, loaded: Loaded) -> tuple[str, str, int] | None:
    """Return statistic, column and number of examples that a number matches, or ``None``.

    A number of few digits may be a setting and needs a fitting key.
    """
    if type(value) not in (int, float) or not LEAST_STATISTIC <= abs(value) < LARGEST_STATISTIC:
        return None
    if _EXAMPLE_COUNTS.search(key):
        return None
    plain = value == float(f"{value:.{DIGITS}g}") and not _FIGURE.search(key)
    for name, column in loaded.columns.items():
        if column.dtype.kind not in "fiu" or len(column) < 2 or column.min() == column.max():
            continue
        if plain and name.lower() not in key.lower():
            continue
        values = column.astype(np.float64)
        figures = {
            "sum": values.sum(),
            "mean": values.mean(),
            "sum of squares": np.square(values).sum(),
            "standard deviation": values.std(ddof=1),
        }
        for figure, number in figures.items():
            if abs(number - value) <= 1e-9 * abs(value):
                return figure, name, len(column)
    return None


def _is_histogram(array: np.ndarray, loaded: Loaded) -> bool:
    """Return ``True`` if integers add up to the number of loaded rows."""
    if array.dtype.kind not in "iu" or len(array) < LEAST_DISTINCT or (array < 0).any():
        return False
    if len(array) == loaded.examples or not np.diff(array.astype(np.float64), 2).any():
        return False
    total = int(array.sum())
    return total >= LEAST_ROWS and any(total == len(column) for column in loaded.columns.values())


def counts_apart(values: Mapping[tuple[str, str], Any], labels: np.ndarray | None) -> Iterator[Leak]:
    """Yield class counts that leave as separate entries, such as ``class_0`` and ``class_1``."""
    for record in dict.fromkeys(record for record, _ in values):
        told = {key: value for (one, key), value in values.items() if one == record}
        plain = {key: value for key, value in told.items() if not _EXAMPLE_COUNTS.search(key)}
        if labels is not None and (keys := entries_of_classes(plain, labels)):
            yield _class_counts(f"{record}/{', '.join(keys)}")


def _class_counts(where: str) -> Leak:
    return Leak(
        severity="facts",
        what="how many of the client's examples are of each class",
        where=where,
        why="It says what the client's people have in common, such as how many are ill.",
    )
