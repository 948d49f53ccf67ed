"""Keeps a second process out of a run's folder; the system lets go when the first one dies."""

import os
import sys
from pathlib import Path

from fl_privacy.errors import UserError


def hold(folder: Path) -> int | None:
    """Lock ``folder`` for this process; the file descriptor that holds the lock, ``None`` on Windows.

    Raises:
        UserError: another process holds it.
    """
    if sys.platform == "win32":
        return None
    import fcntl  # noqa: PLC0415

    descriptor = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(
            f"{folder} is expected to be free, but another process is recording this very run; wait for it, or change"
            " the seed or the out folder."
        ) from error
    return descriptor


def release(descriptor: int | None) -> None:
    """Let go of what ``hold`` returned."""
    if descriptor is not None:
        os.close(descriptor)
