"""Pages of what goes on, for whoever watches: of a run, or of all runs in a folder."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from urllib.parse import quote

from fl_privacy.config.reading import select
from fl_privacy.errors import UserError
from fl_privacy.report.comparison import render_comparison
from fl_privacy.report.gallery import ImageView, view_extremes
from fl_privacy.report.headline import Verdict, verdict
from fl_privacy.report.images import data_uri
from fl_privacy.report.numbers import percent, seconds
from fl_privacy.report.page import render
from fl_privacy.report.readings import kind_of, readings_of
from fl_privacy.report.write import page_of_run
from fl_privacy.results import Run, read_run
from fl_privacy.results.ended import is_aside
from fl_privacy.results.ongoing import PROGRESS, read_guesses, read_ongoing, read_planned

LAST_ROUNDS = 5
"""By which the time left of a training is told."""

SILENT = 300.0
"""Seconds without news from which a run may have been killed."""

AT_ONCE = 10
"""So many times the seconds that a page takes to make pass before it is made again: watching costs a tenth at most."""

_WATCHED = ("metrics.jsonl", "summary.json", "run.json")


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """How far a run is.

    Attributes:
        name: of its folder.
        link: to its page.
        finished: whether it has.
        doing: in words.
        share: of what it does, in [0, 1]; ``None`` where that is not known.
        left: seconds of that; likewise.
        silent: seconds since it last wrote anything.
        verdict: of what is recorded.
        guesses: what the attack that goes on has by now: PNGs as data URIs.
    """

    name: str
    link: str
    finished: bool
    doing: str
    share: float | None
    left: float | None
    silent: float
    verdict: Verdict
    guesses: Sequence[str] = ()

    @property
    def in_words(self) -> str:
        """What it does, how far that is, and how long it takes."""
        words = [self.doing]
        if self.share is not None and not self.finished:
            words.append(percent(self.share))
        if self.left is not None and not self.finished:
            whole = max(1, round(self.left))
            words.append(f"about {f'{whole} s' if whole < 60 else seconds(whole)} left")
        if self.silent > SILENT and not self.finished:
            words.append(f"no news for {seconds(self.silent)}: it may have been killed")
        return ", ".join(words)


@dataclass(eq=False)
class WatchedFolder:
    """The pages of ``folder``, a run's or that of many; made when they are asked for, and kept while nothing changes.

    Raises:
        UserError: there is no such folder.
    """

    folder: Path
    _kept: dict[str, tuple[object, float, str]] = field(default_factory=dict)
    _runs: dict[Path, tuple[object, Run]] = field(default_factory=dict)
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
        if (self.folder / "run.json").is_file():
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
            if not path.is_symlink()
            and not is_aside(path)
            and os.access(path, os.X_OK)
            and (path / "run.json").is_file()
        ]
        return sorted(found, key=lambda path: (_changed(path / "run.json"), path.name))

    def _read(self, path: Path) -> Run:
        signature = _signature(path)
        if path not in self._runs or self._runs[path][0] != signature:
            self._runs[path] = signature, read_run(path)
        return self._runs[path][1]

    def _report(self, path: Path) -> str:
        return self._made(str(path), _signature(path), lambda: page_of_run(self._read(path), live=True))

    def _comparison(self) -> str:
        runs = [run for path in self._folders() if isinstance(run := self._try(path), Run) and run.finished]
        if not runs:
            return self._overview()
        page = self.folder / "comparison.html"
        signature = tuple(_signature(run.path) for run in runs)
        return self._made("comparison", signature, lambda: render_comparison(runs, page, psnr_below=15.0))

    def _overview(self) -> str:
        standings = self._standings()
        over, latest = self._over(standings), self._latest()
        return render("live.html.j2", live=True, folder=self.folder, runs=standings, over=over, latest=latest)

    def _latest(self) -> tuple[str, Sequence[ImageView]] | None:
        """Name of the run that was the last to record images, and those read best, in the middle and worst."""
        for path in sorted(self._folders(), key=lambda path: _changed(path / "metrics.jsonl"), reverse=True):
            run = self._try(path)
            if isinstance(run, Run) and run.of_kind("image") and run.shared != "figures":
                if self._seen is None or self._seen[0] != (path, _signature(path)):
                    self._seen = (path, _signature(path)), view_extremes(run, run.read_pairs()[0])
                return path.name, self._seen[1]
        return None

    def _status_of(self, path: Path) -> str:
        standing = self._standing(path)
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

    def _try(self, path: Path) -> Run | UserError:
        """The run, or why it can't be read: the others of its folder can."""
        try:
            return self._read(path)
        except UserError as error:
            return error

    def _standings(self) -> list[LiveRun]:
        return [
            self._standing(path) if isinstance(run := self._try(path), Run) else _unreadable(path, run)
            for path in self._folders()
        ]

    def _standing(self, path: Path) -> LiveRun:
        run = self._read(path)
        doing, share, left = _doing(run)
        news = max(_changed(path / name) for name in (*_WATCHED, PROGRESS))
        return LiveRun(
            name=path.name,
            link=_link(path),
            finished=run.finished,
            doing=doing,
            share=share,
            left=left,
            silent=max(0.0, time.time() - news),
            verdict=verdict(run.summary, kind_of(readings_of(run.summary))),
            guesses=[] if run.finished or run.shared else [data_uri(image) for image in read_guesses(path)],
        )

    def _made(self, key: str, signature: object, make: Callable[[], str]) -> str:
        """What ``make`` makes, or what it made before if nothing has changed, or not long ago."""
        known = self._kept.get(key)
        if known is not None and (known[0] == signature or time.monotonic() < known[1]):
            return known[2]
        began = time.monotonic()
        text = make()
        now = time.monotonic()
        self._kept[key] = signature, now + AT_ONCE * (now - began), text
        return text


def _link(path: Path) -> str:
    return f"./{quote(path.name)}/report.html"


def _unreadable(path: Path, why: UserError) -> LiveRun:
    return LiveRun(
        name=path.name,
        link=_link(path),
        finished=False,
        doing=str(why),
        share=None,
        left=None,
        silent=0.0,
        verdict=Verdict("Not known", "", "open"),
    )


def _doing(run: Run) -> tuple[str, float | None, float | None]:
    """What a run does, the share of it that is done, and the seconds left."""
    if run.finished:
        return "Finished", 1.0, None
    if (ongoing := read_ongoing(run.path)) is not None:
        return ongoing.what, ongoing.share, ongoing.left
    rounds = run.of_kind("round")
    total = select(run.identity.config, "federation.rounds")
    if run.identity.config.get("command") in {"attack", "audit"} or not isinstance(total, int) or total < 1:
        return f"Goes on, {len(run.of_kind('image'))} attacked examples recorded", None, None
    if len(rounds) >= total:
        return "Trained; goes on with what was intercepted", None, None
    last = [record["seconds"] for record in rounds[-LAST_ROUNDS:]]
    left = (total - len(rounds)) * sum(last) / len(last) if last else None
    return f"Training, round {len(rounds) + 1} of {total}", len(rounds) / total, left


def _signature(path: Path) -> tuple[object, ...]:
    """Changes when the run in ``path`` has recorded something."""
    return tuple((_changed(path / name), _size(path / name)) for name in _WATCHED)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
