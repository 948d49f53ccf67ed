"""Files of an app's folder where the app works, so that ``open("data/rows.csv")`` finds them and writes a copy."""

import os
import shutil
from pathlib import Path

MOST_BYTES = 128 << 20
MOST_FILES = 5000

CODE = (".py", ".pyc", ".fab")
"""What is imported from where it is, or is of no use to the app."""

OTHERS = ("__pycache__", "node_modules", "venv")


def copied_files(app: Path, into: Path) -> str:
    """Copy the files of the folder ``app`` that are no code to ``into``, in the same places; keep what is there.

    Hidden files, links, and folders that hold an audit or ``into`` itself, stay where they are.

    Returns:
        a sentence about what was not copied, since it is too much; empty where all was.
    """
    files = room = 0
    for place, folders, names in os.walk(app):
        here = Path(place)
        folders[:] = sorted(name for name in folders if _is_own(here / name, into))
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


def _is_own(folder: Path, into: Path) -> bool:
    if folder.name.startswith(".") or folder.name in OTHERS or folder.is_symlink():
        return False
    return not into.is_relative_to(folder) and not (folder / "audit.json").exists()
