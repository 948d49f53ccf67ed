"""Pages of what goes on, for whoever watches: of a run, or of all runs in a folder."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from fl_privacy.errors import UserError
from fl_privacy.report.comparison import render_comparison
from fl_privacy.report.gallery import ImageView, view_extremes
from fl_privacy.report.live_run import SILENT, LiveRun, Told, changed_at, signature
from fl_privacy.report.page import render
from fl_privacy.report.write import page_of_run
from fl_privacy.results import read_run
from fl_privacy.results.occupancy import IDENTITY, METRICS, is_aside
from fl_privacy.results.ongoing import read_planned

AT_ONCE = 10
"""So many times the seconds that a page takes to make pass before it is made again: watching costs a tenth at most."""


@dataclass(eq=False)
class WatchedFolder:
    """The pages of ``folder``, a run's or that of many; made when they are asked for, and kept while nothing changes.

    Raises:
        UserError: there is no such folder.
    """

    folder: Path
    _kept: dict[str, tuple[object, float, str]] = field(default_factory=dict)
    _told: dict[Path, tuple[object, Told]] = field(default_factory=dict)
    _seen: tuple[object, Sequence[ImageView]] | None = None
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is expected to be the folder of a run, or of many, but there is no such folder; name"
                " the one that `fl-privacy run` or `trade-off` writes to, out=FOLDER."
            )

    def page(self, address: str) -> str | None:
        """The HTML at ``address``, which is only compared with those there are; ``None`` for any other."""
        with self._lock:  # charts are drawn by settings that threads share
            make = self._pages().get(address)
            return None if make is None else make()

    def _pages(self) -> Mapping[str, Callable[[], str]]:
        if (self.folder / IDENTITY).is_file():
            return self._pages_of(self.folder, "")
        pages: dict[str, Callable[[], str]] = {
            "": self._overview,
            "status": self._status_of_all,
            "comparison.html": self._comparison,
        }
        for path in self._folders():
            pages |= self._pages_of(path, f"{path.name}/")
        return pages

    def _pages_of(self, path: Path, front: str) -> dict[str, Callable[[], str]]:
        return {
            f"{front}report.html" if front else "": lambda: self._report(path),
            f"{front}status": lambda: self._status_of(path),
        }

    def _folders(self) -> list[Path]:
        """Of the runs, in the order in which they began; of those that were replaced there is nothing to watch."""
        found = [
            path
            for path in self.folder.iterdir()
            if not path.is_symlink() and not is_aside(path) and os.access(path, os.X_OK) and (path / IDENTITY).is_file()
        ]
        return sorted(found, key=lambda path: (changed_at(path / IDENTITY), path.name))

    def _read(self, path: Path) -> Told | UserError:
        """What the run tells, or why it can't be read: the others of its folder can."""
        now = signature(path)
        if path not in self._told or self._told[path][0] != now:
            try:
                self._told[path] = now, Told.by(read_run(path))
            except UserError as error:
                return error
        return self._told[path][1]

    def _report(self, path: Path) -> str:
        return self._made(str(path), signature(path), lambda: page_of_run(read_run(path), live=True))

    def _comparison(self) -> str:
        paths = [path for path in self._folders() if isinstance(told := self._read(path), Told) and told.finished]
        if not paths:
            return self._overview()
        page = self.folder / "comparison.html"
        return self._made(
            "comparison",
            tuple(map(signature, paths)),
            lambda: render_comparison([read_run(path) for path in paths], page, psnr_below=15.0),
        )

    def _overview(self) -> str:
        standings = self._standings()
        over, latest = self._over(standings), self._latest()
        return render("live.html.j2", live=True, folder=self.folder, runs=standings, over=over, latest=latest)

    def _latest(self) -> tuple[str, Sequence[ImageView]] | None:
        """Name of the run that was the last to record images, and those read best, in the middle and worst."""
        for path in sorted(self._folders(), key=lambda path: changed_at(path / METRICS), reverse=True):
            told = self._read(path)
            if isinstance(told, Told) and told.pictured:
                if self._seen is None or self._seen[0] != (path, signature(path)):
                    run = read_run(path)
                    self._seen = (path, signature(path)), view_extremes(run, run.read_pairs()[0])
                return path.name, self._seen[1]
        return None

    def _status_of(self, path: Path) -> str:
        told = self._read(path)
        if isinstance(told, UserError):
            raise told
        standing = LiveRun.of(path, told)
        return self._status([standing], over=standing.finished)

    def _status_of_all(self) -> str:
        """Of those that go on; what has been silent for long comes last."""
        standings = self._standings()
        planned = set(read_planned(self.folder))
        done = sum(one.finished for one in standings if not planned or one.name in planned)
        going = sorted((one for one in standings if not one.finished), key=lambda one: one.silent > SILENT)
        return self._status(going, over=self._over(standings), done=done, planned=len(planned))

    def _over(self, standings: list[LiveRun]) -> bool:
        """Whether all that was planned and all that has begun is finished; without a plan there may be more to come."""
        planned = read_planned(self.folder)
        done = {one.name for one in standings if one.finished}
        return bool(planned) and done.issuperset([*planned, *(one.name for one in standings)])

    def _status(self, standings: list[LiveRun], *, over: bool, done: int = 0, planned: int = 0) -> str:
        return render("live_status.html.j2", live=True, runs=standings, done=done, planned=planned, over=over)

    def _standings(self) -> list[LiveRun]:
        return [LiveRun.of(path, self._read(path)) for path in self._folders()]

    def _made(self, key: str, state: object, make: Callable[[], str]) -> str:
        """What ``make`` makes, or what it made before if nothing has changed, or not long ago."""
        known = self._kept.get(key)
        if known is not None and (known[0] == state or time.monotonic() < known[1]):
            return known[2]
        began = time.monotonic()
        text = make()
        now = time.monotonic()
        self._kept[key] = state, now + AT_ONCE * (now - began), text
        return text
