"""Tables of the package, atomic writing of files, private files and folders, and the cache folder."""

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
ORDINARY_FILE = 0o666
"""File mode before the process's umask."""

UNENCODABLE = "backslashreplace"
"""Error handler of ``str.encode`` that writes lone surrogates, which UTF-8 cannot hold, as JSON escapes."""

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""Folder of the configuration: in the package of a wheel, next to the package in a checkout or Flower bundle."""

CACHE_VARIABLE = "FL_PRIVACY_CACHE"
"""Environment variable with the cache folder; if unset, the user's default."""


SHARED_VARIABLE = "FL_PRIVACY_SHARED"
"""Environment variable with the folder of results that jobs share; if unset, each job computes them."""


@contextmanager
def sharing() -> Iterator[None]:
    """Let this process, and those started within the context, share results of ``computed_once``."""
    with tempfile.TemporaryDirectory(prefix="fl-privacy-") as folder:
        os.environ[SHARED_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[SHARED_VARIABLE]


def computed_once(key: bytes, compute: Callable[[], bytes]) -> tuple[bytes, float]:
    """Return the result of ``compute``, or that of another job with the same ``key``, and the seconds it took."""
    started = time.perf_counter()
    folder = os.environ.get(SHARED_VARIABLE)
    path = Path(folder) / hashlib.sha256(key).hexdigest() if folder and Path(folder).is_dir() else None
    if path is not None and path.is_file():
        took, _, content = path.read_bytes().partition(b"\n")
        return content, float(took)
    content, seconds = compute(), time.perf_counter() - started
    if path is not None:
        write_private(path, f"{seconds}\n".encode() + content)
    return content, seconds


def shipped(module: str, name: str) -> Any:
    """Return the content of the JSON or YAML file ``name``, which is in the folder of the file ``module``."""
    text = Path(module).with_name(name).read_text("utf-8")
    if name.endswith(".json"):
        return json.loads(text)
    import yaml  # noqa: PLC0415  (the core goes without)

    return yaml.safe_load(text)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write ``content`` to ``path`` atomically: readers see the old file or the new one, also after a crash."""
    _replace(path, content, ORDINARY_FILE)


def write_private(path: Path, content: bytes | str) -> None:
    """Write ``content`` to ``path`` atomically, readable by its owner only."""
    _replace(path, content, PRIVATE_FILE)


def make_private_folder(folder: Path, within: Path) -> None:
    """Make ``folder`` and its parents up to ``within``, included, and let only their owner access them."""
    within.parent.mkdir(parents=True, exist_ok=True)
    for step in reversed([folder, *folder.parents]):
        if step.is_relative_to(within):
            step.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            step.chmod(PRIVATE_FOLDER)


def make_missing_private(folder: Path) -> None:
    """Make ``folder`` and its missing parents, accessible to their owner only; existing ones are unchanged."""
    for step in reversed([folder, *folder.parents]):
        step.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def user_cache_folder() -> Path:
    """Return the cache folder, which may not exist yet."""
    import platformdirs  # noqa: PLC0415  (the core goes without)

    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("fl_privacy"))


def _replace(path: Path, content: bytes | str, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode(errors=UNENCODABLE) if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_out_folder(folder: Path, within: Path, out: Path) -> None:
    """Make ``folder`` and its parents up to ``within``, for the owner only; else a ``UserError`` names ``out``."""
    try:
        make_private_folder(folder, within)
    except OSError as error:
        raise UserError(
            f"--out is expected to be a folder that can be written, but got {out}: {error.strerror}; name another."
        ) from error
