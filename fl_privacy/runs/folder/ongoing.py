"""Name and lock run folders, and save the progress of their work for live pages."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_privacy.checks import fits
from fl_privacy.errors import UserError
from fl_privacy.files import write_private, write_whole
from fl_privacy.runs.folder.pictures import Pieces, Pixels
from fl_privacy.runs.folder.records import dump_json
from fl_privacy.types.film import Frame, Snapshot, TextFrame

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, IDENTITY, METRICS, SUMMARY = "config.yaml", "run.json", "metrics.jsonl", "summary.json"
"""Files of a run: configuration, identity, records, and the summary that marks its end."""

CAPTURES = "captures"  # subfolder of intercepted updates that are kept
WAITING = ".waiting"  # subfolder of updates that wait for their attack; deleted after it


def is_finished(path: Path) -> bool:
    """Return whether the run in folder ``path`` finished."""
    return (path / SUMMARY).is_file()


def expect_finished(path: Path) -> None:
    """Raise ``UserError`` unless the run in folder ``path`` finished."""
    if not is_finished(path):
        raise UserError(f"{path} is expected to hold a finished run, but has no summary.json; start the run again.")


def is_aside(path: Path) -> bool:
    """Return whether the folder was renamed by :func:`move_aside`."""
    return re.search(r"-(interrupted|previous)-\d+$", path.name) is not None


def move_aside(path: Path, why: str) -> None:
    """Rename the run's folder ``path`` to the first free ``<path>-<why>-<number>``; delete its buffered updates."""
    shutil.rmtree(path / WAITING, ignore_errors=True)
    names = (f"{path.name}-{why}-{number}" for number in itertools.count(1))
    path.rename(next(aside for name in names if not (aside := path.with_name(name)).exists()))


LOCKS = ".locks"  # folder of locks next to the runs' folders, since a run's folder may be moved or deleted


def hold(folder: Path) -> FileLock:
    """Lock ``folder``, which may not exist yet; ``UserError`` if another process holds it. May raise ``OSError``."""
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


PROGRESS, PICTURES, TEXTS, PLAN = "progress.json", "progress.safetensors", "progress-texts.json", "plan.json"
PICTURED = 3  # guesses shown during an attack
TELL_EVERY = 2.0  # seconds between updates
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Ongoing:
    """Progress of a run: current work in words, the ``share`` in [0, 1] of it that is done, and the seconds spent."""

    what: str
    share: float
    seconds: float

    @property
    def left(self) -> float | None:
        return self.seconds * (1 - self.share) / self.share if self.share > 0 else None


class Teller:
    """Saves the progress of some work to a file in ``folder`` every few seconds; deletes the file at the end."""

    def __init__(self, folder: Path) -> None:
        self._path, self._pictures, self._texts = (folder / name for name in (PROGRESS, PICTURES, TEXTS))
        self._written = self._pictured = 0.0

    def telling(
        self, what: str | Callable[[], str], progress: Callable[[int, int], None]
    ) -> Callable[[int, int], None]:
        started = time.monotonic()

        def tell(done: int, total: int) -> None:
            progress(done, total)
            now = time.monotonic()
            if now - self._written >= TELL_EVERY:
                self._written = now
                share = min(1.0, done / max(total, 1))
                content = {"what": what() if callable(what) else what, "share": share, "seconds": now - started}
                with suppress(OSError):  # progress must not stop the work
                    write_whole(self._path, dump_json(content))

        return tell

    def picture(self, frames: Sequence[Snapshot], pieces: Callable[[Tensor], Sequence[str]]) -> None:
        """Save current reconstructions, readable only by the owner; ``pieces`` converts token ids (L,) to strings."""
        now = time.monotonic()
        if not frames or now - self._pictured < TELL_EVERY:
            return
        self._pictured = now
        images = [frame.image.numpy() for frame in frames if isinstance(frame, Frame)][:PICTURED]
        texts = [list(pieces(frame.tokens)) for frame in frames if isinstance(frame, TextFrame)][:PICTURED]
        with suppress(OSError):
            if images:
                write_private(self._pictures, save({f"image-{k}": image for k, image in enumerate(images)}))
            if texts:
                write_private(self._texts, json.dumps({"texts": texts}, ensure_ascii=False))

    def clear(self) -> None:
        for path in (self._path, self._pictures, self._texts):
            path.unlink(missing_ok=True)


def read_ongoing(folder: Path) -> Ongoing | None:
    """Return the progress saved in the untrusted ``folder``; ``None`` if there is none, or it is malformed."""
    content = _read(folder / PROGRESS)
    kinds = {"what": str, "share": float, "seconds": float}
    if not isinstance(content, dict) or not all(fits(content.get(name), kind) for name, kind in kinds.items()):
        return None
    return Ongoing(content["what"], min(1.0, max(0.0, content["share"])), max(0.0, content["seconds"]))


def read_guesses(folder: Path) -> list[Pixels]:
    """Return the current guesses, images (C, H, W), in the untrusted ``folder``; empty if there are none."""
    if not (folder / PICTURES).is_file():
        return []
    with suppress(SafetensorError, OSError, ValueError), safe_open(folder / PICTURES, framework="np") as file:
        slices = [(name, file.get_slice(name)) for name in sorted(file.keys())[:PICTURED]]
        shapes = [(name, of.get_shape()) for name, of in slices if of.get_dtype() == "U8"]
        sound = [name for name, shape in shapes if len(shape) == 3 and 0 < math.prod(shape) <= _MOST_BYTES]
        return [file.get_tensor(name) for name in sound]
    return []


def read_texts(folder: Path) -> list[Pieces]:
    """Return the running attack's current texts as tokens, from the untrusted ``folder``; empty if there are none."""
    content = _read(folder / TEXTS)
    texts = content.get("texts") if isinstance(content, dict) else None
    return list(map(tuple, texts[:PICTURED])) if isinstance(texts, list) and fits(texts, list[list[str]]) else []


def write_planned(out: Path, jobs: Sequence[str]) -> None:
    """Add ``jobs`` (folder names) to the planned jobs in ``out``, and remove finished ones; may raise ``OSError``."""
    file = out / LOCKS / f"{PLAN}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file, timeout=10):  # another sweep may start now
        before = read_planned(out)
        planned = [job for job in before if job not in jobs and not is_finished(out / job)] + list(jobs)
        if planned != before:
            write_whole(out / PLAN, dump_json({"jobs": planned}))


def read_planned(out: Path) -> list[str]:
    """Return the folders planned by sweeps in ``out``; empty if there are none."""
    content = _read(out / PLAN)
    jobs = content.get("jobs") if isinstance(content, dict) else None
    return [str(job) for job in jobs] if isinstance(jobs, list) and fits(jobs, list[str]) else []


def _read(path: Path) -> object:
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return json.loads(path.read_text())
    return None
