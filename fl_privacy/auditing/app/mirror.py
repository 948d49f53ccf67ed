"""Data sets by their hub name from files of a local folder, for sites without the hub."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError

KINDS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json", ".json": "json"}
"""Of files that make a data set -> the reader of ``datasets`` for them."""


@contextmanager
def mirrored(folder: Path | None) -> Iterator[set[str]]:
    """Redirect ``datasets.load_dataset`` from ``someone/NAME`` to ``folder/NAME``, and collect the names asked for.

    A data set is a folder of files ``<split>.parquet``, ``.csv`` or ``.json(l)``, named as on the hub with or without
    its owner, with ``-`` or ``_``. What the folder does not have is an error that names the folder, not a download.
    """
    asked: set[str] = set()
    if folder is None or importlib.util.find_spec("datasets") is None:
        yield asked
        return
    if not folder.is_dir():
        raise UserError(f"--mirror is expected to be a folder, but got {folder}.")
    datasets: Any = importlib.import_module("datasets")
    original = datasets.load_dataset

    def load(path: Any, name: Any = None, *args: Any, split: Any = None, **kwargs: Any) -> Any:
        if str(path) in {"parquet", "csv", "json", "imagefolder", "text", "arrow"} or Path(str(path)).exists():
            return original(path, name, *args, split=split, **kwargs)
        asked.add(str(path))
        found = _find(folder, str(path), name)
        if found is None:
            raise FileNotFoundError(f"{path} is not in the mirror {folder}")
        files: dict[str, list[str]] = {}
        for file in sorted(found.iterdir()):
            if file.suffix in KINDS:
                files.setdefault(file.stem.partition("-")[0], []).append(str(file))
        kind = next(KINDS[file.suffix] for file in sorted(found.iterdir()) if file.suffix in KINDS)
        return original(kind, data_files=files, split=split)

    datasets.load_dataset = load
    try:
        yield asked
    finally:
        datasets.load_dataset = original


@contextmanager
def in_one_process() -> Iterator[None]:
    """Let ``datasets`` map without extra processes, since forks of this one may hang on its threads."""
    if importlib.util.find_spec("datasets") is None:
        yield
        return
    owner: Any = importlib.import_module("datasets").Dataset
    original = owner.map

    def mapped(self: Any, *args: Any, num_proc: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    owner.map = mapped
    try:
        yield
    finally:
        owner.map = original


def _find(folder: Path, path: str, name: object) -> Path | None:
    short = path.rpartition("/")[2]
    names = [path.replace("/", "__"), path, short]
    if isinstance(name, str):
        names = [f"{each}-{name}" for each in names] + names
    spellings = [each for one in names for each in (one, one.lower(), one.replace("-", "_").lower())]
    for each in dict.fromkeys(spellings):
        place = folder / each
        if place.is_dir() and any(file.suffix in KINDS for file in place.iterdir()):
            return place
    return None
