"""Data sets in folders on this machine: parquet files in the hub's schema, or images by class."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_privacy.data.sources import ROOT_VARIABLE, Source, Tables, file_stamps, require
from fl_privacy.errors import UserError

_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}

MOST_UNPACKED = 100
"""Times its size that a parquet file may unpack to, beside a gigabyte; encoded images hardly shrink."""


@dataclass(frozen=True)
class ParquetFolder:
    """``<folder>/<split>.parquet``, or the hub's ``<split>-00000-of-00002.parquet``."""

    folder: Path

    def identity(self) -> list[str]:
        """Paths, times and sizes of the files."""
        return file_stamps(self._files())

    def tables(self) -> Tables:
        """Read the files whole; the images stay encoded."""
        hf = require("datasets")
        shards: dict[str, list[Any]] = {}
        for file in self._files():
            shards.setdefault(file.stem.split("-")[0], []).append(hf.Dataset(_read_parquet(file)))
        return {split: hf.concatenate_datasets(rows) for split, rows in shards.items()}

    def _files(self) -> list[Path]:
        return sorted(file for file in self.folder.glob("*.parquet") if file.is_file())


@dataclass(frozen=True)
class ImageFolder:
    """``<folder>/<class>/*.jpg``, or ``<folder>/<split>/<class>/*.jpg`` where there is a folder ``train``.

    Attributes:
        folder: as above.
        classes: all of them, in the order of their labels; ``None`` takes those that have a folder.
    """

    folder: Path
    classes: tuple[str, ...] | None = None

    def identity(self) -> list[str]:
        """Paths, times and sizes of the images, and the classes."""
        return [*(self.classes or ()), *self._stamps()]

    def _stamps(self) -> list[str]:
        return file_stamps(file for classes in self._splits().values() for files in classes.values() for file in files)

    def tables(self) -> Tables:
        """A table of paths with their class for each split."""
        splits = self._splits()
        found = sorted({label for classes in splits.values() for label in classes})
        names = found if self.classes is None else list(self.classes)
        if unknown := sorted(set(found) - set(names)):
            raise UserError(
                f"Folders of {self.folder} are expected to be called like the classes {', '.join(names)}, but one is"
                f" {unknown[0]}; rename it or add it to data.classes."
            )
        hf = require("datasets")
        features = hf.Features(image=hf.Image(decode=False), label=hf.ClassLabel(names=names))
        return {
            split: hf.Dataset.from_dict(
                {
                    "image": [{"bytes": None, "path": str(f)} for files in classes.values() for f in files],
                    "label": [names.index(label) for label, files in classes.items() for _ in files],
                },
                features=features,
            )
            for split, classes in splits.items()
        }

    def _splits(self) -> dict[str, dict[str, list[Path]]]:
        folders = _subfolders(self.folder)
        splits = {f.name: f for f in folders} if (self.folder / "train").is_dir() else {"train": self.folder}
        found = {split: _images_by_class(folder) for split, folder in splits.items()}
        if not found["train"]:
            raise UserError(
                f"{self.folder} is expected to hold one folder of images for each class, or <split>.parquet files,"
                " but got neither; set data.root to such a folder."
            )
        return {split: classes for split, classes in found.items() if classes}


def local_source(folder: Path) -> Source:
    """The data set in ``folder``: parquet files if there are any, else class folders of images.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        parent = folder.parent
        there = ", ".join(f.name for f in _subfolders(parent)) if parent.is_dir() else "no such folder either"
        raise UserError(
            f"A folder {folder} is expected, but there is none (in {parent}: {there or 'nothing'});"
            f" set data.root or {ROOT_VARIABLE}."
        )
    return ParquetFolder(folder) if any(folder.glob("*.parquet")) else ImageFolder(folder)


def environment_folder(name: str) -> Path | None:
    """The folder of the data set ``name`` under ``FL_PRIVACY_DATA``, if there is one."""
    root = os.environ.get(ROOT_VARIABLE)
    if not root:
        return None
    if not Path(root).is_dir():
        raise UserError(f"{ROOT_VARIABLE} is expected to be a folder, but got {root}; correct or unset it.")
    folder = Path(root) / name
    return folder if folder.is_dir() else None


def _read_parquet(file: Path) -> Any:
    arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    try:
        about = parquet.read_metadata(file)
        size = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
        if size > MOST_UNPACKED * file.stat().st_size + (1 << 30):
            raise UserError(
                f"{file} is expected to hold images, but its {file.stat().st_size} bytes unpack to {size}; remove it."
            )
        return parquet.read_table(file)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{file} is expected to be a parquet file, but can't be read: {str(error).splitlines()[0].rstrip('.')};"
            " copy or download it again."
        ) from error


def _subfolders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def _images_by_class(folder: Path) -> dict[str, list[Path]]:
    classes = {
        f.name: sorted(p for p in f.rglob("*") if p.suffix.lower() in _IMAGE_SUFFIXES and p.is_file())
        for f in _subfolders(folder)
    }
    return {name: files for name, files in classes.items() if files}
