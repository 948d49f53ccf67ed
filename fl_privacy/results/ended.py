"""Whether a run came to its end, and the folders of runs that did not, or were run again."""

import re
import shutil
from pathlib import Path

from fl_privacy.errors import UserError

WAITING = ".waiting"
"""Folder within a run's, of updates that wait for their attack where they are many; gone with the attack."""


def is_finished(path: Path) -> bool:
    """Whether the run in folder ``path`` came to its end."""
    return (path / "summary.json").is_file()


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
