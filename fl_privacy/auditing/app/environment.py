"""What an app finds where it runs: data sets by hub name, its files, a working folder, names that Flower has moved."""

import importlib
import importlib.util
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from flwr.app import Context

from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.auditing.strategy import AuditedStrategy
from fl_privacy.errors import UserError

KINDS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json", ".json": "json"}
"""File suffix -> format name of ``datasets``."""

MOST_BYTES = 128 << 20
MOST_FILES = 5000

CODE = (".py", ".pyc", ".fab")
"""Suffixes of files that are imported in place, or of no use to the app."""

OTHERS = ("__pycache__", "node_modules", "venv")

MOVED: Mapping[str, Mapping[str, str]] = {
    "flwr.common.typing": {"UserConfig": "flwr.app", "UserConfigValue": "flwr.app"},
    "flwr.client.typing": {"ClientAppCallable": "flwr.clientapp.typing", "Mod": "flwr.clientapp.typing"},
}
"""Earlier module -> its names -> their present modules."""


@dataclass(frozen=True)
class Around:
    """What was done for an app, or left out.

    Attributes:
        data: names of data sets that the app loaded from the mirror.
        missing: sentence on files that were not copied, if any.
        audits: an entry for each of its own audits that was left out.
        lent: moved names of Flower that it uses.
    """

    data: set[str]
    missing: str
    audits: list[bool]
    lent: list[str]

    def lent_in_words(self) -> str:
        return (
            f"The app names {', '.join(self.lent)}, which Flower {metadata.version('flwr')} has elsewhere: it was lent"
            " them here, and would not start by itself."
        )


@contextmanager
def around(app: Path, files: Path, mirror: Path | None) -> Iterator[Around]:
    """Let the app in the folder ``app`` work in the folder ``files``, with data sets from ``mirror``.

    Raises:
        UserError: ``mirror`` is no folder.
    """
    with ExitStack() as stack:
        data = stack.enter_context(mirrored(mirror))
        stack.enter_context(in_one_process())
        before, path = Path.cwd(), list(sys.path)
        os.chdir(files)
        stack.callback(lambda: sys.path.__setitem__(slice(None), path))
        stack.callback(os.chdir, before)
        missing = copied_files(app, files)
        audits, lent = stack.enter_context(own_audits_left_out()), stack.enter_context(moved_names_lent())
        yield Around(data, missing, audits, lent)


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

    def redirected(original: Any) -> Any:
        def load(path: Any, name: Any = None, *args: Any, split: Any = None, **kwargs: Any) -> Any:
            if str(path) in {"parquet", "csv", "json", "imagefolder", "text", "arrow"} or Path(str(path)).exists():
                return original(path, name, *args, split=split, **kwargs)
            asked.add(str(path))
            found = _find(folder, str(path), name)
            if found is None:
                raise FileNotFoundError(f"{path} is not in the mirror {folder}")
            kept = [file for file in sorted(found.iterdir()) if file.suffix in KINDS]
            files: dict[str, list[str]] = {}
            for file in kept:
                files.setdefault(file.stem.partition("-")[0], []).append(str(file))
            return original(KINDS[kept[0].suffix], data_files=files, split=split)

        return load

    with replaced(importlib.import_module("datasets"), "load_dataset", redirected):
        yield asked


@contextmanager
def in_one_process() -> Iterator[None]:
    """Make ``datasets`` map without extra processes, since forks of this one may hang on its threads."""
    if importlib.util.find_spec("datasets") is None:
        yield
        return

    def alone(original: Any) -> Any:
        def mapped(self: Any, *args: Any, num_proc: Any = None, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        return mapped

    with replaced(importlib.import_module("datasets").Dataset, "map", alone):
        yield


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


def copied_files(app: Path, into: Path) -> str:
    """Copy the non-code files of the folder ``app`` to ``into``, without overwriting.

    Hidden files, links, and folders that hold an audit or ``into`` are skipped. Returns a sentence on files left out
    for their size, or "".
    """

    def is_own(folder: Path) -> bool:
        if folder.name.startswith(".") or folder.name in OTHERS or folder.is_symlink():
            return False
        return not into.is_relative_to(folder) and not (folder / "audit.json").exists()

    files = room = 0
    for place, folders, names in os.walk(app):
        here = Path(place)
        folders[:] = sorted(name for name in folders if is_own(here / name))
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


@contextmanager
def own_audits_left_out() -> Iterator[list[bool]]:
    """Train the app's strategies under ``audit`` without it until the block ends; list one entry for each."""
    found = list[bool]()

    def start(self: AuditedStrategy, *args: Any, **kwargs: Any) -> Any:
        found.append(True)
        return self.strategy.start(*args, **kwargs)

    with replaced(AuditedStrategy, "start", lambda original: start):
        yield found


@contextmanager
def moved_names_lent() -> Iterator[list[str]]:
    """Provide the names in ``MOVED``, if missing, until the block ends; list those used, as ``module.name``."""
    asked: list[str] = []

    def lender(place: str, names: Mapping[str, str]) -> Any:
        def lend(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"module {place!r} has no attribute {name!r}")
            if f"{place}.{name}" not in asked:
                asked.append(f"{place}.{name}")
            return getattr(importlib.import_module(names[name]), name)

        return lend

    with ExitStack() as stack:
        for place, names in MOVED.items():
            try:
                module: Any = importlib.import_module(place)
            except ModuleNotFoundError:
                module = ModuleType(place)
                sys.modules[place] = module
                stack.callback(sys.modules.pop, place, None)
            if not hasattr(module, "__getattr__"):
                module.__getattr__ = lender(place, names)
                stack.callback(delattr, module, "__getattr__")
        yield asked


def configure(context: Context, partition: int, config: Mapping[str, Any], node_config: Mapping[str, Any]) -> None:
    """Give a node the run config and its node config; ``{partition}`` in a text becomes its number."""
    context.run_config = dict(config)
    for key, value in node_config.items():
        context.node_config[key] = value.replace("{partition}", str(partition)) if isinstance(value, str) else value


def seeded(seed: int) -> None:
    """Seed all random streams that apps use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
