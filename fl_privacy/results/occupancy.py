"""A run's folder: what its files are called, whether it is in use, holds a run that has ended, or was put aside."""

import re
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from fl_privacy.errors import UserError

CONFIG, IDENTITY, METRICS, SUMMARY = "config.yaml", "run.json", "metrics.jsonl", "summary.json"
"""Files of a run: its configuration, what it is told apart by, what was recorded, and the sum of that when it ended."""

CAPTURES = "captures"
"""Folder within a run's, of the intercepted updates that are kept."""

WAITING = ".waiting"
"""Folder within a run's, of updates that wait for their attack where they are many; gone with the attack."""


def is_finished(path: Path) -> bool:
    """Whether the run in folder ``path`` came to its end."""
    return (path / SUMMARY).is_file()


def expect_finished(path: Path) -> None:
    """Raise ``UserError`` unless the run in folder ``path`` came to its end."""
    if not is_finished(path):
        raise UserError(f"{path} is expected to hold a finished run, but has no summary.json; start the run again.")


def is_aside(path: Path) -> bool:
    """Whether ``move_aside`` gave the folder ``path`` its name."""
    return re.search(r"-(interrupted|previous)-\d+$", path.name) is not None


def move_aside(path: Path, why: str) -> None:
    """Rename the folder ``path``, which this process holds, to the first free ``<path>-<why>-<number>``.

    Updates that were to be attacked and are of no use any more do not stay.
    """
    shutil.rmtree(path / WAITING, ignore_errors=True)
    number = 1
    while (aside := path.with_name(f"{path.name}-{why}-{number}")).exists():
        number += 1
    path.rename(aside)


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
