"""What a source of data is, and what all of them need."""

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
