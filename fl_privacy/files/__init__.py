"""Files that are either whole or not there, files for their owner alone, and where what took time to make is kept."""

import os
import secrets
from pathlib import Path

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
ORDINARY_FILE = 0o666
"""Of which the process's umask takes its share."""

UNENCODABLE = "backslashreplace"
"""What becomes of half a surrogate pair, which JSON from elsewhere or a file's name may hold and no UTF-8 can: it is
spelled as JSON spells it."""

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""What there is to choose from: inside the package in a wheel, beside it in a checkout and in a Flower app bundle."""

CACHE_VARIABLE = "FL_PRIVACY_CACHE"
"""Environment variable: the folder of what is kept for the next run; the user's cache folder if unset."""


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace ``path`` at once; a reader, or a crash, sees the old file or the new one."""
    _replace(path, content, ORDINARY_FILE)


def write_private(path: Path, content: bytes | str) -> None:
    """Write a whole file, as ``write_whole`` does, that only its owner can read, from its first byte on."""
    _replace(path, content, PRIVATE_FILE)


def make_private_folder(folder: Path, within: Path) -> None:
    """Make ``folder`` and what lies between ``within`` and it, both included, for their owner alone."""
    within.parent.mkdir(parents=True, exist_ok=True)
    for step in reversed([folder, *folder.parents]):
        if step.is_relative_to(within):
            step.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            step.chmod(PRIVATE_FOLDER)


def make_missing_private(folder: Path) -> None:
    """Make ``folder`` and those above it that are missing for their owner alone; what is there stays as it is."""
    for step in reversed([folder, *folder.parents]):
        step.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def user_cache_folder() -> Path:
    """Return the user's cache folder, whether or not it exists yet."""
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
