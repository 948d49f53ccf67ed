"""Load any table: find it, infer its columns, split and encode it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fl_privacy.checks import one_of
from fl_privacy.data.datasets import TEST_SPLITS, Dataset, expect_train, hold_out
from fl_privacy.data.examples import LABEL_COLUMNS, TableExamples, encode_labels, find_column
from fl_privacy.data.sources import HubData, ParquetFolder, environment_folder, hub_source, read_parquet, require
from fl_privacy.errors import UserError, reason_of
from fl_privacy.files.foreign import expanded
from fl_privacy.types.schema import MOST_CATEGORIES, Column, Schema

Missing = Literal["keep", "drop"]
"""``keep``: missing categories become a category, missing numbers the median; ``drop``: such rows are left out."""

Standardize = Literal["numbers", "all"]
"""``numbers``: numbers get mean 0 and deviation 1, categories stay 1 and 0; ``all``: both do, as in TabLeak."""

TARGETS = (*LABEL_COLUMNS, "income", "diagnosis", "outcome", "num")  # columns searched for the target, in this order
MISSING = "(missing)"  # name of a missing category
MOST_BYTES = 1 << 31  # most bytes of a CSV file

QUANTITY, ROWS_OF_A_NUMBER, ROWS_OF_A_NAME = 20, 10, 2
"""With over ``QUANTITY`` different values, a target holds classes only if each has this many rows on average."""

_VALUE = re.compile(r"-?\d+\.\d+(e[-+]?\d+)?", re.IGNORECASE)  # values that betray a file without a header
_AROUND = "\ufeff \t\r\n"  # characters stripped from the names of columns
_ON_THE_HUB = {"adult": HubData("scikit-learn/adult-census-income")}
_NULLS = ("", "?", "NA", "N/A", "NaN", "nan", "null", "None")


@dataclass(frozen=True)
class _Reading:
    target: str | None
    group_column: str | None
    attribute_column: str | None
    categories: tuple[str, ...]
    leave_out: tuple[str, ...]
    missing: Missing
    standardize: Standardize

    def __post_init__(self) -> None:
        one_of("data.missing", self.missing, get_args(Missing))
        one_of("data.standardize", self.standardize, get_args(Standardize))


def load_table(
    name: str = "breast_cancer",
    *,
    path: str | None = None,
    root: str | None = None,
    target: str | None = None,
    group_column: str | None = None,
    attribute_column: str | None = None,
    categories: Sequence[str] | None = None,
    leave_out: Sequence[str] | None = None,
    missing: Missing = "keep",
    standardize: Standardize = "numbers",
) -> Dataset:
    """Load the training and test rows of a table.

    Sources: ``path``; scikit-learn for ``breast_cancer``; as in :func:`load_data` for other names. Without a test
    split, every fifth row of each class is held out. Columns of text, of booleans and in ``categories`` are
    categorical, others numeric. ``UserError`` if there is no such table or column, or a file can't be read.

    Args:
        name: name of the table; for ``root``, see :func:`load_data`.
        path: a .csv or .parquet file, or a folder of ``<split>.parquet`` files.
        target: column to predict; ``None`` takes a usual name, such as ``label`` or ``income``.
        group_column: column that names each row's owner, for the natural partition; not a feature.
        attribute_column: sensitive column that attribute inference guesses; not a feature.
        categories: numeric columns that are codes of categories.
        leave_out: columns that a model does not see.
        missing: treatment of rows that lack a value: ``keep`` or ``drop``.
        standardize: values that get mean 0 and deviation 1: ``numbers`` or ``all``.
    """
    codes, hidden = (tuple(map(str, given or ())) for given in (categories, leave_out))
    reading = _Reading(target, group_column, attribute_column, codes, hidden, missing, standardize)
    frames, classes = _frames(name, path, root)
    return _dataset(frames, classes, reading, name if path is None else Path(path).stem)


def table_of(
    frame: Any,
    *,
    name: str = "table",
    test: Any = None,
    target: str | None = None,
    group_column: str | None = None,
    attribute_column: str | None = None,
    categories: Sequence[str] | None = None,
    leave_out: Sequence[str] | None = None,
    missing: Missing = "keep",
    standardize: Standardize = "numbers",
) -> Dataset:
    """Make a data set of the rows in the pandas DataFrame ``frame``, and ``test`` rows, if given.

    For the other arguments see :func:`load_table`. ``UserError`` if one is no DataFrame, or lacks a column.
    """
    for given in (frame, *([] if test is None else [test])):
        if not hasattr(given, "columns") or not hasattr(given, "iloc"):
            raise UserError(
                f"A table is expected to be a pandas DataFrame, but got {type(given).__name__}; convert it."
            )
    codes, hidden = (tuple(map(str, given or ())) for given in (categories, leave_out))
    reading = _Reading(target, group_column, attribute_column, codes, hidden, missing, standardize)
    return _dataset([frame] if test is None else [frame, test], None, reading, name)


def _frames(name: str, path: str | None, root: str | None) -> tuple[list[Any], Sequence[str] | None]:
    if path is not None:
        return _of_path(expanded(path))
    if name == "breast_cancer" and root is None:
        bunch = require("sklearn.datasets", package="scikit-learn").load_breast_cancer(as_frame=True)
        return [bunch.frame], [str(each) for each in bunch.target_names]
    if name == "table" and root is not None:
        return _of_path(expanded(root))
    if name == "table":
        raise UserError("data=table is expected with a file, but got none; set data.path=FILE.csv.")
    folder = environment_folder(name) if root is None else expanded(root) / name
    if folder is not None:
        return _of_path(folder)
    return _of_splits(hub_source(name, _ON_THE_HUB, "breast_cancer (or set data.path=FILE.csv)").tables(), name)


def _of_path(path: Path) -> tuple[list[Any], Sequence[str] | None]:
    if path.is_dir():
        return _of_splits(ParquetFolder(path).tables(), path.name)
    if not path.is_file():
        raise UserError(f"data.path is expected to be a .csv or .parquet file, but there is none at {path}; check it.")
    pandas = require("pandas")
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"data.path is expected to be a .csv or .parquet file, but got {path.name}; convert it.")
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path} is expected to have at most {MOST_BYTES >> 30} GiB, but has more; take a part of it.")
    try:
        if path.suffix.lower() == ".csv":
            frame = pandas.read_csv(path, na_values=list(_NULLS), keep_default_na=True, skipinitialspace=True)
        else:
            frame = read_parquet(path).to_pandas()
    except (ValueError, OSError, UnicodeDecodeError, MemoryError) as error:
        reason = reason_of(error)
        raise UserError(
            f"{path} is expected to be a table, but can't be read: {reason}; write it as CSV in UTF-8, or as parquet."
        ) from error
    if len(frame.columns) == 1 and (other := re.search(r"[;\t|]", str(frame.columns[0]))):
        raise UserError(
            f"{path} is expected to be separated by commas, but its first line has {other[0]!r}; write it with commas"
            " between values and points in numbers."
        )
    return [frame], None


def _of_splits(tables: Mapping[str, Any], name: str) -> tuple[list[Any], Sequence[str] | None]:
    expect_train(tables, name)
    test = next((split for split in TEST_SPLITS if split in tables), None)
    column = next((each for each in TARGETS if each in tables["train"].column_names), None)
    names = None if column is None else getattr(tables["train"].features[column], "names", None)
    return [tables[split].to_pandas() for split in ("train", test) if split is not None], names


def _dataset(frames: Sequence[Any], names: Sequence[str] | None, reading: _Reading, name: str) -> Dataset:
    frames = [frame.set_axis([str(each).strip(_AROUND) for each in frame.columns], axis=1) for frame in frames]
    columns = list(frames[0].columns)
    if len(set(columns)) != len(columns):
        raise UserError(f"The columns of table {name} are expected to differ in name, but do not; rename them.")
    _expect_columns(frames, columns, reading, name)
    target = _target(columns, reading, name)
    special = [each for each in (target, reading.group_column, reading.attribute_column) if each]
    features = [column for column in columns if column not in (*special, *reading.leave_out)]
    frames = [frame[frame[target].notna()] for frame in frames]
    if reading.missing == "drop":
        frames = [frame[frame[features].notna().all(axis=1)] for frame in frames]
    whole = require("pandas").concat(frames, ignore_index=True)
    for column in features:
        if column not in reading.categories and (numbers := written_numbers(whole[column])) is not None:
            whole[column] = numbers
    _expect_classes(whole[target], target, reading, name)
    sizes = [len(frame) for frame in frames]
    labels, classes = _codes(whole[target], names, target, name, setting="data.target")
    own: dict[str, tuple[Tensor | None, tuple[str, ...]]] = {"group_column": (None, ()), "attribute_column": (None, ())}
    for setting in own:
        if (column := getattr(reading, setting)) is not None:
            own[setting] = _codes(whole[column], None, column, name, setting=f"data.{setting}")
    found = [_column(whole[column], column, reading) for column in features]
    if not found:
        raise UserError(f"Table {name} is expected to have columns besides its target {target}, but has none; add one.")
    schema = Schema(tuple(column for column, _ in found))
    examples = TableExamples(
        inputs=schema.encode(torch.stack([cells for _, cells in found], 1)),
        labels=labels,
        class_names=classes,
        schema=schema,
        groups=own["group_column"][0],
        attributes=own["attribute_column"][0],
        attribute_names=own["attribute_column"][1],
    )
    if len(sizes) == 1:
        return Dataset(*hold_out(examples), name)
    train, test = (examples.subset(part) for part in torch.arange(len(whole)).split(sizes))
    return Dataset(train, test, name)


def _expect_columns(frames: Sequence[Any], columns: Sequence[str], reading: _Reading, name: str) -> None:
    asked = {
        "data.target": [reading.target],
        "data.group_column": [reading.group_column],
        "data.attribute_column": [reading.attribute_column],
        "data.categories": reading.categories,
        "data.leave_out": reading.leave_out,
    }
    for setting, given in asked.items():
        if unknown := [each for each in given if each and each not in columns]:
            raise UserError(
                f"{setting} is expected to name columns of table {name}, but got {unknown[0]!r}; name one of"
                f" {', '.join(columns[:40])}."
            )
    for frame in frames[1:]:
        if lacking := sorted(set(columns) - set(frame.columns)):
            raise UserError(f"Column {lacking[0]} is expected in table {name}, but its test split lacks it; add it.")


def _target(columns: Sequence[str], reading: _Reading, name: str) -> str:
    folded = {column.casefold() for column in columns}
    if reading.target is None and not folded & set(TARGETS) and (values := list(filter(_VALUE.fullmatch, columns))):
        raise UserError(
            f"The first line of table {name} is expected to name its columns, but has {', '.join(values[:3])}; put a"
            " line of names in front."
        )
    return find_column(columns, reading.target, TARGETS, kind="target", name=name, setting="data.target")


def _expect_classes(values: Any, target: str, reading: _Reading, name: str) -> None:
    if len(values) < 2:
        raise UserError(
            f"Table {name} is expected to have at least 2 rows in which its target {target} is known, but has"
            f" {len(values)}; add rows, or set data.target to another column."
        )
    kinds = require("pandas.api.types", package="pandas")
    is_number = kinds.is_numeric_dtype(values) or written_numbers(values) is not None
    distinct = values.nunique()
    least = ROWS_OF_A_NUMBER if is_number else ROWS_OF_A_NAME
    if distinct > QUANTITY and len(values) < least * distinct and target not in reading.categories:
        what = "a quantity" if is_number else "a name"
        raise UserError(
            f"Target {target} of table {name} is expected to hold classes, but has {distinct} different values in"
            f" {len(values)} rows, as {what} has; regression is not supported: put it into ranges, such as low and"
            f" high, set data.target to another column, or, if these are codes of classes, data.categories=[{target}]."
        )


def _codes(
    values: Any, names: Sequence[str] | None, column: str, name: str, *, setting: str
) -> tuple[Tensor, tuple[str, ...]]:
    plain = values.to_numpy()
    if plain.dtype.kind not in "biuf":
        plain = np.asarray(values.astype(object).where(values.notna(), MISSING).map(str), dtype=str)
        names = None
    found, called = encode_labels([plain], names, column, name, setting)
    return found[0], called


def _column(values: Any, name: str, reading: _Reading) -> tuple[Column, Tensor]:
    kinds = require("pandas.api.types", package="pandas")
    is_number = kinds.is_numeric_dtype(values) and not kinds.is_bool_dtype(values)
    if not is_number or name in reading.categories:
        return _categories(values, name, reading)
    numbers = torch.tensor(values.to_numpy(dtype=np.float64, na_value=math.nan).copy())
    known = numbers[numbers.isfinite()]
    if not len(known):
        raise UserError(f"Column {name} is expected to have a number, but got none; add it to data.leave_out.")
    numbers = torch.where(numbers.isfinite(), numbers, known.median())
    std = float(numbers.std())
    powers, rounding = [10**digits for digits in range(6)], 1e-6 * known.abs().clamp_min(1e-6)
    exact = (bool(((known - (known * p).round() / p).abs() <= rounding).all()) for p in powers)
    column = Column(
        name=name,
        shift=(float(numbers.mean()),),
        scale=(std if std > 0 else 1.0,),
        low=float(known.min()),
        high=float(known.max()),
        decimals=next((digits for digits, all_of_them in enumerate(exact) if all_of_them), 6),
    )
    return column, numbers


LONGEST_NUMBER = 40  # most characters of a number

_SIGNS = re.compile(r"^\s*([-+]?)\s*[$\u20ac\u00a3\u00a5]?\s*(.*?)\s*[%$\u20ac\u00a3\u00a5]?\s*$")
"""Sign, currency and percent signs around a number."""

_THOUSANDS = re.compile(
    r"\d{1,3}([,' \u00a0\u2009\u202f])\d{3}(\1\d{3})*(\.\d+)?|\d*\.?\d+(e[-+]?\d+)?|\d+\.", re.IGNORECASE
)
_COMMAS = re.compile(r"\d{1,3}([.' \u00a0\u2009\u202f])\d{3}(\1\d{3})*(,\d+)?|\d+(,\d+)?")
"""Numbers with a decimal point, and with a decimal comma."""


def written_numbers(values: Any) -> Any:
    """Return the numbers that a pandas column (N,) holds as ``Decimal`` or text: ``1,234``, ``3,14``, ``$ 1 234.50``.

    ``None`` if some cell is no number, or all are digits alone, which may be codes of categories.
    """
    known = values[values.notna()]
    if not len(known) or (values.dtype != object and str(values.dtype) not in ("string", "str")):
        return None
    if all(isinstance(cell, Decimal) for cell in known):
        return values.map(float, na_action="ignore").astype(np.float64)
    if not all(isinstance(cell, str | Decimal | int | float) for cell in known):
        return None
    texts = {text for cell in known if (text := str(cell).strip()) not in _NULLS}
    if all(map(str.isdigit, texts)) or max(map(len, texts)) > LONGEST_NUMBER:
        return None
    bare = [part[2] if (part := _SIGNS.fullmatch(text)) else "" for text in texts]
    point = all(map(_THOUSANDS.fullmatch, bare))
    if not point and not all(map(_COMMAS.fullmatch, bare)):
        return None

    def number(cell: Any) -> float:
        part = _SIGNS.fullmatch(str(cell).strip())
        if part is None or str(cell).strip() in _NULLS:
            return math.nan
        digits = re.sub(r"[,' \u00a0\u2009\u202f]" if point else r"[.' \u00a0\u2009\u202f]", "", part[2])
        return float(part[1] + digits.replace(",", "."))

    return values.map(number, na_action="ignore").astype(np.float64)


def _categories(values: Any, name: str, reading: _Reading) -> tuple[Column, Tensor]:
    text = values.astype(object).where(values.notna(), MISSING).map(lambda cell: str(cell).strip())
    text = text.where(~text.isin(_NULLS), MISSING)
    names, codes = np.unique(np.asarray(text, dtype=str), return_inverse=True)
    if len(names) > MOST_CATEGORIES:
        raise UserError(
            f"Column {name} is expected to have at most {MOST_CATEGORIES} categories, but has {len(names)}; put it into"
            " data.leave_out."
        )
    cells, count = torch.from_numpy(codes.astype(np.float64)), len(names)
    shift, scale = (0.0,) * count, (1.0,) * count
    if reading.standardize == "all":
        shares = torch.bincount(cells.long(), minlength=count).double() / len(cells)
        std = (shares * (1 - shares)).sqrt()
        shift, scale = tuple(shares.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
    return Column(name=name, categories=tuple(map(str, names)), shift=shift, scale=scale), cells
