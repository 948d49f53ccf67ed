"""Files that only their owner may read, and that exist either whole or not at all."""

import os
import tempfile
from pathlib import Path


def make_private_folder(folder: Path, within: Path) -> None:
    """Make ``folder`` and what lies between ``within`` and it, both included, with mode 0700."""
    within.mkdir(parents=True, exist_ok=True)
    for step in reversed([folder, *folder.parents]):
        if step.is_relative_to(within):
            step.mkdir(exist_ok=True)
            step.chmod(0o700)


def write_private_file(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` with mode 0600, then move it there in one step."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
