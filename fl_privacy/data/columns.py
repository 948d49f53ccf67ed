"""Columns of images, labels and owners in a table."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_privacy.errors import UserError

IMAGE_COLUMNS = ("image", "img", "pixel_values", "png", "jpg")
"""Columns searched for images, in this order."""

LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "character", "y")
"""Columns searched for labels, in this order."""

MOST_NAMED = 40
"""Most columns that an error names."""


def find_column(
    columns: Sequence[str], chosen: str | None, usual: Sequence[str], *, kind: str, name: str, setting: str = ""
) -> str:
    """Find the column ``chosen`` by the user, else the first of ``usual``; an exact match comes before another case."""
    wanted_names = [chosen] if chosen else usual
    found = next((column for column in wanted_names if column in columns), None)
    if found is None:  # the hub's CelebA has Smiling, others have smiling
        alike = {column.strip().casefold(): column for column in columns}
        found = next((alike[name.casefold()] for name in wanted_names if name.casefold() in alike), None)
    if found is None:
        wanted = chosen or f"one of {', '.join(usual)}"
        raise UserError(
            f"Data set {name} is expected to have the {kind} column {wanted}, but got"
            f" {', '.join(columns[:MOST_NAMED])}{', ...' * (len(columns) > MOST_NAMED)}; set"
            f" {setting or f'data.{kind}_column'}."
        )
    return found


def encode_labels(
    parts: Sequence[Sequence[Any]],
    names: Sequence[str] | None,
    column: str,
    name: str,
    setting: str = "data.label_column",
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Encode label columns as indices (N,) int64, alike in all ``parts``, and return them with the K class names.

    Without given ``names``, the classes are the sorted distinct values.
    """
    values = np.concatenate([np.asarray(part) for part in parts])
    if values.dtype == object or values.ndim != 1:
        raise UserError(
            f"Column {column} of data set {name} is expected to hold one class an example, but got missing or"
            f" nested values; set {setting} to another."
        )
    _expect_classes(values, column, name, numbered=names is not None)
    if names is None:
        distinct, values = np.unique(values, return_inverse=True)
        names = [f"not {column}", column] if distinct.dtype == bool else [str(value) for value in distinct]
    if values.min() < 0 or values.max() >= len(names):
        raise UserError(
            f"Labels of data set {name} are expected within 0..{len(names) - 1},"
            f" but got {values.min()}..{values.max()}; set {setting} to another, or use a labelled split."
        )
    if len(names) < 2:
        raise UserError(f"Data set {name} is expected to have at least 2 classes, but got only {names[0]}.")
    return list(torch.from_numpy(values.astype(np.int64)).split([len(part) for part in parts])), tuple(names)


def _expect_classes(values: "np.ndarray[Any, Any]", column: str, name: str, *, numbered: bool) -> None:
    """Refuse marks of a missing class, which would become a class of their own if not ``numbered``."""
    numbers = values.astype(float) if values.dtype.kind in "fiu" else np.zeros(0)
    if not np.isfinite(numbers).all():
        raise UserError(
            f"Column {column} of data set {name} is expected to hold one class an example, but"
            f" {int((~np.isfinite(numbers)).sum())} examples have NaN or infinity; remove these examples."
        )
    if not numbered and numbers.size and numbers.min() < 0 and set(np.unique(numbers)) != {-1.0, 1.0}:
        raise UserError(
            f"Column {column} of data set {name} is expected to hold classes from 0, or -1 and 1, but"
            f" {int((numbers < 0).sum())} examples have {numbers.min():g}, the usual mark of a missing class; remove"
            " these examples or number the classes from 0."
        )
