"""Files that are either whole or not there, and files for their owner alone."""

import os
import secrets
from pathlib import Path

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600
ORDINARY_FILE = 0o666
"""Of which the process's umask takes its share."""


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace ``path`` at once; a reader, or a crash, sees the old file or the new one."""
    _replace(path, content, ORDINARY_FILE)


def write_private(path: Path, content: bytes | str) -> None:
    """``write_whole`` of a file that only its owner can read, from its first byte on."""
    _replace(path, content, PRIVATE_FILE)


def make_private_directory(path: Path) -> Path:
    """Create ``path`` for its owner alone, or close it to others if it is there already."""
    path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    path.chmod(PRIVATE_DIRECTORY)
    return path


def _replace(path: Path, content: bytes | str, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
