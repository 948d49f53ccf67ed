"""Tables of the package, atomic writing of files, private files and folders, and the cache folder."""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
ORDINARY_FILE = 0o666  # file mode before the process's umask

UNENCODABLE = "backslashreplace"
"""Error handler of ``str.encode`` that writes lone surrogates, which UTF-8 cannot hold, as JSON escapes."""

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""Folder of the configuration: in the package of a wheel, next to the package in a checkout or Flower bundle."""

CACHE_VARIABLE = "FL_PRIVACY_CACHE"  # environment variable with the cache folder; if unset, the user's default


logger: logging.Logger = logging.getLogger(__name__)

LOCKED = "_locked"  # end of the name of a temporary folder that is locked as long as it is in use
NEW_SECONDS = 60.0  # age of a temporary folder below which it may not be locked yet

_locks = dict[Path, int]()


def make_temporary(prefix: str) -> Path:
    """Create a temporary folder for its owner alone, and remove those that killed processes have left."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=LOCKED)).resolve()
    _locks[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(_locks[folder], fcntl.LOCK_EX)
    for other in folder.parent.glob(f"fl-privacy-*{LOCKED}"):
        with suppress(OSError):  # another user's, in use, or removed meanwhile
            descriptor = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(descriptor)
                if found.st_uid == os.geteuid() and time.time() - found.st_ctime > NEW_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_untrusted(other)
            finally:
                os.close(descriptor)
    return folder


def remove_temporary(folder: Path) -> None:
    """Remove a folder of ``make_temporary``."""
    remove_untrusted(folder)
    os.close(_locks.pop(folder))


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder of ``make_temporary``, which is removed in the end."""
    folder = make_temporary(prefix)
    try:
        yield folder
    finally:
        remove_temporary(folder)


def remove_untrusted(folder: Path) -> None:
    """Remove a folder whose content is untrusted and may change meanwhile; log errors and leave the rest."""
    prefix, taken = folder / f"taken-{secrets.token_hex(8)}", 0
    try:
        pending = [folder]
        while pending:
            here = pending.pop()
            descriptor = _opened(here)
            try:
                with os.scandir(descriptor) as found:
                    entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
                for name, is_folder in entries:
                    if not is_folder:
                        os.unlink(name, dir_fd=descriptor)
                    elif here == folder:
                        pending.append(folder / name)
                    else:
                        os.close(_opened(name, descriptor))  # only what its owner may write can be moved
                        os.rename(name, f"{prefix}-{taken}", src_dir_fd=descriptor)
                        pending.append(Path(f"{prefix}-{taken}"))
                        taken += 1
            finally:
                os.close(descriptor)
            if here != folder:
                here.rmdir()
        folder.rmdir()
    except OSError as error:
        logger.warning("The folder %s could not be removed (%s); remove it by hand.", folder, error)


def _opened(path: Path | str, folder: int | None = None) -> int:
    named = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=folder)
    try:
        Path(f"/proc/self/fd/{named}").chmod(PRIVATE_FOLDER)
        return os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(named)


SHARED_VARIABLE = "FL_PRIVACY_SHARED"
"""Environment variable with the folder of results that jobs share; if unset, each job computes them."""


@contextmanager
def sharing() -> Iterator[None]:
    """Let this process, and those started within the context, reuse each other's results of ``computed_once``."""
    with temporary_folder("fl-privacy-shared-") as folder:
        os.environ[SHARED_VARIABLE] = str(folder)
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
    """Make ``folder`` and its parents up to ``within``, for the owner only.

    If that fails, a ``UserError`` names ``out``, the value of the option ``--out``.
    """
    try:
        make_private_folder(folder, within)
    except OSError as error:
        raise UserError(
            f"--out is expected to be a folder that can be written, but got {out}: {error.strerror}; name another."
        ) from error
