"""Checks of untrusted files and folders before reading or writing them."""

import hashlib
import importlib
import lzma
import os
import pickle
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Collection
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from typing import Any

from fl_privacy.errors import UserError

LARGEST_FILE = 1 << 32  # most bytes of a file within a run's folder


LARGEST_TEXT, LARGEST_HASHED = 1 << 26, 1 << 22
"""Most bytes of a file of settings or tables, and of a file that ``files_digest`` hashes."""

DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, RuntimeError),
    *(SyntaxError, TypeError, ValueError, TokenError, lzma.LZMAError, pickle.UnpicklingError, struct.error),
    *(zipfile.BadZipFile, zlib.error),
)
"""Errors that NumPy, PyTorch, pickle, msgpack and zip raise for damaged bytes."""


def expanded(path: str | Path) -> Path:
    """Return ``path`` with ``~`` or ``~name`` replaced by the home folder; ``UserError`` for an invalid path."""
    if "\0" in str(path):
        raise UserError(f"A path is expected, but {str(path)!r} has a zero character, which no name has; correct it.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path} is expected to be in a home folder, but got none; give the whole path.") from error


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file without blocking, like ``os.open``, and return its descriptor.

    ``UserError`` if the path is a pipe, a device or a folder; ``OSError`` if the file can't be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise UserError(f"{path} is expected to be an ordinary file, but is a folder, a pipe or a device; name a file.")


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Return an untrusted file's text; ``UserError`` unless it is a regular UTF-8 file of at most ``most`` bytes."""
    try:
        with os.fdopen(open_regular(path), encoding="utf-8") as file:
            if (size := os.fstat(file.fileno()).st_size) > most:
                raise UserError(
                    f"{path} is expected to have at most {most >> 20} MiB, but has {-(-size >> 20)}; cut it."
                )
            return file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is expected to be UTF-8 text, but is not; save it as UTF-8.") from error
    except OSError as error:
        raise UserError(f"{path} is expected to be a readable file, but: {error.strerror}; name another.") from error


def files_digest(folder: Path, most: int = 20_000) -> str:
    """Return the SHA-256 of the names and contents of all files in a folder; "" if there are more than ``most``.

    Hidden files, byte code, and files above 4 MiB are left out.
    """
    whole, paths = hashlib.sha256(), list(islice(folder.rglob("*"), 10 * most + 1))
    inner = [path.relative_to(folder) for path in sorted(paths) if path.is_file() and not path.is_symlink()]
    inner = [path for path in inner if not any(part.startswith((".", "__pycache__")) for part in path.parts)]
    if len(inner) > most or len(paths) > 10 * most:
        return ""
    for path in inner:
        with os.fdopen(open_regular(folder / path), "rb") as file:
            if os.fstat(file.fileno()).st_size <= LARGEST_HASHED:
                whole.update(f"{path.as_posix()}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def expect_file_name(out: Path) -> None:
    """Raise ``UserError`` if ``out`` is empty or a folder."""
    if not out.name or out.is_dir():
        what = f"the folder {out}" if out.name else "nothing"
        raise UserError(f"--out is expected to be a file, but names {what}; write --out page.html, or leave it out.")


def expect_writable(file: Path) -> None:
    """Make the folder of ``file``; raise ``UserError`` if that or writing a file there fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UserError(
            f"out is expected to be a file that can be written, but {file} can't ({error.strerror}); set out=FILE."
        ) from error


def expect_regular_files(folder: Path, without: Collection[str] = ()) -> None:
    """Raise ``UserError`` if a folder, but for ``without``, has a link, pipe, device or file over ``LARGEST_FILE``."""
    waiting = [folder]
    while waiting:
        within = waiting.pop()
        with suppress(FileNotFoundError), os.scandir(within) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    if within != folder or entry.name not in without:
                        waiting.append(Path(entry.path))
                elif what := _irregular(entry):
                    raise UserError(
                        f"{folder} is expected to hold ordinary files only, but"
                        f" {Path(entry.path).relative_to(folder)} {what}; remove it."
                    )


def _irregular(entry: os.DirEntry[str]) -> str | None:
    if entry.is_symlink():
        return "is a link"
    with suppress(FileNotFoundError):
        found = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return "is a pipe or a device"
        if found.st_size > LARGEST_FILE:
            return f"is a file of {found.st_size >> 20} MiB, more than {LARGEST_FILE >> 20}"
    return None


_HOMES = {
    "_reconstruct": ("numpy._core.multiarray", "numpy.core.multiarray"),
    "scalar": ("numpy._core.multiarray", "numpy.core.multiarray"),
    "_frombuffer": ("numpy._core.numeric", "numpy.core.numeric"),
}
"""Name of a NumPy array constructor -> its module since NumPy 2, and before."""


class ArrayUnpickler(pickle.Unpickler):
    """Unpickler that loads only NumPy arrays and plain values, and so runs no code from the file."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _HOMES.get(name, ()):
            home = next(one for one in _HOMES[name] if find_spec(one))
            return getattr(importlib.import_module(home), name)
        if module == "numpy" and name in {"ndarray", "dtype"}:
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a NumPy array")
