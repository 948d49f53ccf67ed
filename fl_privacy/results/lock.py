"""Keeps a second process out of a run's folder; the system lets go when the first one dies."""

from pathlib import Path

from filelock import FileLock, Timeout

from fl_privacy.errors import UserError

LOCKS = ".locks"
"""Folder beside the runs' folders: a lock within a run's folder would be moved or deleted with it, and two processes
could then hold one each."""

Lock = FileLock


def hold(folder: Path) -> Lock:
    """Lock ``folder``, which need not exist yet, for this process; ``release`` what is returned.

    Raises:
        UserError: another process holds it.
        OSError: nothing can be written beside it.
    """
    folder = folder.resolve()
    file = folder.parent / LOCKS / f"{folder.name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(
            f"{folder} is expected to be free, but another process is recording this very run; wait for it, or change"
            " the seed or the out folder."
        ) from error
    return lock


def release(lock: Lock | None) -> None:
    """Let go of what ``hold`` returned."""
    if lock is not None:
        lock.release()
