"""Labelled sets of images, texts or rows in memory, and vocabularies."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.types import Batch
from fl_privacy.types.modality import BEGINNINGS, IMAGES, ROWS, TEXTS, Modality, as_shown
from fl_privacy.types.schema import Schema


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary: text of each token id; ``special`` are ids without text, such as [CLS]."""

    tokens: tuple[str, ...]
    special: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.tokens)

    def pieces(self, numbers: Iterable[int]) -> list[str]:
        return [self.tokens[number] for number in numbers if 0 <= number < len(self.tokens)]

    def words(self, numbers: Iterable[int]) -> list[str]:
        found: list[str] = []
        for piece in self.pieces(number for number in numbers if number not in self.special):
            shown, goes_on = as_shown(piece)
            if found and (goes_on or (self._begins_words and not piece.startswith(BEGINNINGS))):
                found[-1] += shown
            else:
                found.append(shown)
        return found

    def word_numbers(self, tokens: Tensor) -> Tensor:
        rows = [[zlib.crc32(word.encode()) for word in self.words(row)] for row in tokens.tolist()]
        width = max(1, max(map(len, rows), default=1))
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.long).reshape(-1, width)

    @cached_property
    def _begins_words(self) -> bool:
        return any(token.startswith(BEGINNINGS) for token in self.tokens)


class LabelledExamples(ABC):
    """Interface of labelled images, texts and rows in memory."""

    modality: ClassVar[Modality]

    labels: Tensor  # (N,) int64 in [0, number of names)
    class_names: tuple[str, ...]
    groups: Tensor | None  # (N,) int64 owners (a writer, a person), or ``None``
    attributes: Tensor | None  # (N,) int64 in [0, A), or ``None``
    attribute_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""

    @property
    @abstractmethod
    def architecture(self) -> Mapping[str, Any]:
        """Arguments of a model that depend on the data."""

    @abstractmethod
    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> Batch:
        """Return the examples at ``indices`` as a batch for a model."""

    def subset(self, indices: Tensor) -> Self:
        values = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        rows = {name: value[indices] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **rows)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class Examples(LabelledExamples):
    """Images (N, C, H, W), kept as bytes; batches are floats."""

    modality: ClassVar[Modality] = IMAGES

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    groups: Tensor | None = None
    attributes: Tensor | None = None
    attribute_names: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, int, int]:
        _, c, h, w = self.images.shape
        return c, h, w

    @property
    def architecture(self) -> Mapping[str, int]:
        channels, height, _ = self.input_shape
        return {"in_channels": channels, "image_size": height, "num_classes": self.num_classes}

    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> Batch:
        return Batch(self.images[indices].to(device).float() / 255, self.labels[indices].to(device))


@dataclass(frozen=True, eq=False, kw_only=True)
class TextExamples(LabelledExamples):
    """Texts as ``tokens`` (N, L) int32, left-aligned and padded with -1."""

    modality: ClassVar[Modality] = TEXTS

    tokens: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    vocabulary: Vocabulary
    next_token: bool = False  # ``True`` for models that predict each next token rather than the class of the text
    groups: Tensor | None = None
    attributes: Tensor | None = None
    attribute_names: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        return len(self.vocabulary) if self.next_token else len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.tokens.shape[1],)

    @property
    def architecture(self) -> Mapping[str, int]:
        sizes = {"vocabulary_size": len(self.vocabulary), "max_length": self.tokens.shape[1]}
        return {**sizes, "num_classes": self.num_classes, "next_token": self.next_token}

    @cached_property
    def lengths(self) -> Tensor:
        return (self.tokens >= 0).sum(1)

    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> Batch:
        """Return the texts at ``indices``; labels are classes, or next tokens (B, L), -100 where none follows."""
        tokens = self.tokens[indices]
        tokens = tokens[..., : max(1, int(self.lengths[indices].max()))].to(device, torch.long)
        if not self.next_token:
            return Batch(tokens, self.labels[indices].to(device))
        follows = torch.cat([tokens[..., 1:], tokens.new_full((*tokens.shape[:-1], 1), -1)], -1)
        return Batch(tokens, follows.masked_fill(follows < 0, -100))


@dataclass(frozen=True, eq=False, kw_only=True)
class TableExamples(LabelledExamples):
    """Rows (N, F) float32 of a table, encoded by ``schema``."""

    modality: ClassVar[Modality] = ROWS

    inputs: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    schema: Schema
    groups: Tensor | None = None
    attributes: Tensor | None = None
    attribute_names: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.inputs.shape[1],)

    @property
    def architecture(self) -> Mapping[str, Any]:
        return {"schema": self.schema, "in_features": self.inputs.shape[1], "num_classes": self.num_classes}

    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> Batch:
        return Batch(self.inputs[indices].to(device), self.labels[indices].to(device))


def texts_of(examples: LabelledExamples) -> TextExamples | None:
    """Return ``examples`` if they are texts, else ``None``."""
    return examples if isinstance(examples, TextExamples) else None


def images_of(examples: LabelledExamples) -> Examples | None:
    """Return ``examples`` if they are images, else ``None``."""
    return examples if isinstance(examples, Examples) else None


def expect_images(examples: LabelledExamples, what: str) -> Examples:
    """Return ``examples`` if they are images; else raise ``UserError`` for the feature ``what``."""
    if not isinstance(examples, Examples):
        raise UserError(
            f"{what} is expected with images, but the data are {examples.modality.data}; leave it out, or take images."
        )
    return examples


IMAGE_COLUMNS = ("image", "img", "pixel_values", "png", "jpg")  # columns searched for images, in this order

LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "character", "y")

MOST_NAMED = 40  # most columns that an error names


def find_column(
    columns: Sequence[str], chosen: str | None, usual: Sequence[str], *, kind: str, name: str, setting: str = ""
) -> str:
    """Return the column named ``chosen`` or, if it is ``None``, the first of the ``usual`` names; case does not matter.

    If there is none, ``UserError`` names its role ``kind``, the data set and the ``setting`` to change.
    """
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
    """Return each split's label column as class indices (N,) int64, and the names of the K classes.

    ``parts``: label columns of the splits. ``names``: class names, of which values are indices; ``None`` takes the
    sorted distinct values as classes. ``UserError``, which names ``column``, data set ``name`` and ``setting``, if
    values are missing or do not fit, or there is only one class.
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
        raise UserError(f"Data set {name} is expected to have at least 2 classes, but got {names[0]}; add one.")
    return list(torch.from_numpy(values.astype(np.int64)).split([len(part) for part in parts])), tuple(names)


def _expect_classes(values: "np.ndarray[Any, Any]", column: str, name: str, *, numbered: bool) -> None:
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
