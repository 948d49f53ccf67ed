"""Data sets by hub name from a local folder, and copies of an app's files."""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError

KINDS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json", ".json": "json"}
"""File suffix -> format name of ``datasets``."""


@contextmanager
def mirrored(folder: Path | None) -> Iterator[set[str]]:
    """Redirect ``datasets.load_dataset`` from ``someone/NAME`` to ``folder/NAME``, and collect the requested names.

    A data set is a folder of files ``<split>.parquet``, ``.csv`` or ``.json(l)``, named as on the hub with or without
    its owner, with ``-`` or ``_``. A missing one is an error that names the folder, not a download.
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
    """Make ``datasets`` map without extra processes, since forks of this one may hang on its threads."""
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


MOST_BYTES = 128 << 20
MOST_FILES = 5000

CODE = (".py", ".pyc", ".fab")
"""Suffixes of files that are imported in place, or of no use to the app."""

OTHERS = ("__pycache__", "node_modules", "venv")


def copied_files(app: Path, into: Path) -> str:
    """Copy the non-code files of the folder ``app`` to ``into``, without overwriting.

    Hidden files, links, and folders that hold an audit or ``into`` are skipped. Returns a sentence on files left out
    for their size, or "".
    """
    files = room = 0
    for place, folders, names in os.walk(app):
        here = Path(place)
        folders[:] = sorted(name for name in folders if _is_own(here / name, into))
        for name in sorted(names):
            source, target = here / name, into / here.relative_to(app) / name
            if name.startswith(".") or source.suffix in CODE or source.is_symlink() or not source.is_file():
                continue
            size = source.stat().st_size
            if room + size > MOST_BYTES or files >= MOST_FILES:
                return (
                    f"Copies of the app's files are where it works, but not {source.relative_to(app)} and what comes"
                    f" after, beyond {MOST_BYTES >> 20} MiB or {MOST_FILES} files; give the app whole paths."
                )
            files, room = files + 1, room + size
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    return ""


def _is_own(folder: Path, into: Path) -> bool:
    if folder.name.startswith(".") or folder.name in OTHERS or folder.is_symlink():
        return False
    return not into.is_relative_to(folder) and not (folder / "audit.json").exists()
