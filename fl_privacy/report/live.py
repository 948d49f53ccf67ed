"""Show the progress of runs on live pages."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from fl_privacy.errors import UserError
from fl_privacy.report.comparison import render_comparison
from fl_privacy.report.gallery import Piece, data_uri, uncolored, views
from fl_privacy.report.headline import Headline, headline_of
from fl_privacy.report.page import render
from fl_privacy.report.words import percent, seconds
from fl_privacy.report.write import page_of_run
from fl_privacy.runs.config.parse import select
from fl_privacy.runs.folder import Run, ongoing, read_run, verdict_of
from fl_privacy.runs.folder.verdict import OPEN

LAST_ROUNDS = 5  # last rounds from which the time left is estimated
SILENT = 300.0  # seconds without news after which a run may have been killed
_WATCHED = (ongoing.METRICS, ongoing.SUMMARY, ongoing.IDENTITY)  # files that change when a run records something


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """Progress of a run; ``share`` in [0, 1], ``left`` in seconds, ``silent``: seconds since the run wrote a file."""

    name: str
    link: str
    doing: str
    finished: bool = False
    share: float | None = None
    left: float | None = None
    silent: float = 0.0
    verdict: Headline = field(default_factory=lambda: Headline("Not known", "", OPEN))
    guesses: Sequence[str] = ()
    texts: Sequence[Sequence[Piece]] = ()

    @classmethod
    def of(cls, path: Path, state: "RunState | UserError") -> "LiveRun":
        link = f"./{quote(path.name)}/report.html"
        if isinstance(state, UserError):
            return cls(name=path.name, link=link, doing=str(state))
        doing, share, left = _doing(path, state)
        hidden = state.finished or state.shared
        news = max(_changed(path / name)[0] for name in (*_WATCHED, ongoing.PROGRESS))
        return cls(
            name=path.name,
            link=link,
            finished=state.finished,
            doing=doing,
            share=share,
            left=left,
            silent=max(0.0, time.time() - news),
            verdict=state.verdict,
            guesses=[] if hidden else [data_uri(image) for image in ongoing.read_guesses(path)],
            texts=[] if hidden else [uncolored(text) for text in ongoing.read_texts(path)],
        )

    @property
    def in_words(self) -> str:
        if self.finished:
            return self.doing
        words = [self.doing, *([] if self.share is None else [percent(self.share)])]
        if self.left is not None:
            whole = max(1, round(self.left))
            words.append(f"about {f'{whole} s' if whole < 60 else seconds(whole)} left")
        if self.silent > SILENT:
            words.append(f"no news for {seconds(self.silent)}: it may have been killed")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Status of a run when it was last loaded; ``last``: durations of the last rounds in seconds."""

    finished: bool
    verdict: Headline
    pictured: bool
    attacked: int  # number of attacked examples
    rounds: int  # number of finished rounds
    total: int | None  # number of planned rounds; ``None`` without training
    last: tuple[float, ...]
    shared: bool

    @classmethod
    def by(cls, run: Run) -> "RunState":
        rounds, images = run.of_kind("round"), run.of_kind("image")
        total = select(run.identity.config, "federation.rounds")
        trains = run.identity.config.get("command") not in {"attack", "audit"} and isinstance(total, int) and total >= 1
        return cls(
            finished=run.finished,
            verdict=headline_of(verdict_of(run)),
            pictured=bool(images) and run.shared != "figures",
            attacked=len(images),
            rounds=len(rounds),
            total=total if trains else None,
            last=tuple(record["seconds"] for record in rounds[-LAST_ROUNDS:]),
            shared=run.shared is not None,
        )


def _doing(path: Path, state: RunState) -> tuple[str, float | None, float | None]:
    if state.finished:
        return "Finished", 1.0, None
    if (task := ongoing.read_ongoing(path)) is not None:
        return task.what, task.share, task.left
    if state.total is None:
        return f"In progress, {state.attacked} attacked examples recorded", None, None
    if state.rounds >= state.total:
        return "Trained; the intercepted uploads are attacked", None, None
    left = (state.total - state.rounds) * sum(state.last) / len(state.last) if state.last else None
    return f"Training, round {state.rounds + 1} of {state.total}", state.rounds / state.total, left


def signature(path: Path) -> tuple[object, ...]:
    """Return a value that changes when the run in ``path`` records something."""
    return tuple(_changed(path / name) for name in _WATCHED)


def _changed(path: Path) -> tuple[float, int]:
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size


AT_ONCE = 10  # least interval between renderings of a page, in multiples of its rendering time


@dataclass(eq=False)
class WatchedFolder:
    """Pages of a folder with one run or many, rendered on request; ``UserError`` if there is no folder."""

    folder: Path
    _kept: dict[str, tuple[object, float, str]] = field(default_factory=dict)
    _states: dict[Path, tuple[object, RunState]] = field(default_factory=dict)
    _seen: tuple[object, Sequence[Mapping[str, Any]]] | None = None
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} is expected to be the folder of a run, or of many, but there is no such folder; name"
                " the one that `fl-privacy run` or `trade-off` writes to, out=FOLDER."
            )

    def page(self, address: str) -> str | None:
        with self._lock:  # charts use settings shared between threads
            if (self.folder / ongoing.IDENTITY).is_file():
                pages = self._pages_of(self.folder, "")
            else:
                pages = {"": self._overview, "status": self._status_of_all, "comparison.html": self._comparison}
                for path in self._folders():
                    pages |= self._pages_of(path, f"{path.name}/")
            return pages[address]() if address in pages else None

    def _pages_of(self, path: Path, front: str) -> dict[str, Callable[[], str]]:
        def status() -> str:
            state = self._read(path)
            if isinstance(state, UserError):
                raise state
            standing = LiveRun.of(path, state)
            return self._status([standing], over=standing.finished)

        def page() -> str:
            return self._made(str(path), signature(path), lambda: page_of_run(read_run(path), live=True))

        return {f"{front}report.html" if front else "": page, f"{front}status": status}

    def _folders(self) -> list[Path]:
        own = (path for path in self.folder.iterdir() if not path.is_symlink() and not ongoing.is_aside(path))
        found = (path for path in own if os.access(path, os.X_OK) and (path / ongoing.IDENTITY).is_file())
        return sorted(found, key=lambda path: (_changed(path / ongoing.IDENTITY)[0], path.name))

    def _read(self, path: Path) -> RunState | UserError:
        now = signature(path)
        if path not in self._states or self._states[path][0] != now:
            try:
                self._states[path] = now, RunState.by(read_run(path))
            except UserError as error:
                return error
        return self._states[path][1]

    def _comparison(self) -> str:
        paths = [path for path in self._folders() if isinstance(state := self._read(path), RunState) and state.finished]
        if not paths:
            return self._overview()

        def page() -> str:
            return render_comparison(list(map(read_run, paths)), self.folder / "comparison.html", psnr_below=15.0)

        return self._made("comparison", tuple(map(signature, paths)), page)

    def _overview(self) -> str:
        standings = self._standings()
        over, latest = self._over(standings), self._latest()
        return render("live.html.j2", live=True, folder=self.folder, runs=standings, over=over, latest=latest)

    def _latest(self) -> tuple[str, Sequence[Mapping[str, Any]]] | None:
        for path in sorted(self._folders(), key=lambda path: _changed(path / ongoing.METRICS)[0], reverse=True):
            state = self._read(path)
            if isinstance(state, RunState) and state.pictured:
                if self._seen is None or self._seen[0] != (path, signature(path)):
                    run = read_run(path)
                    self._seen = (path, signature(path)), views(run, run.read_pairs()[0])[0]
                return path.name, self._seen[1]
        return None

    def _status_of_all(self) -> str:
        standings = self._standings()
        planned = set(ongoing.read_planned(self.folder))
        done = sum(one.finished for one in standings if not planned or one.name in planned)
        going = sorted((one for one in standings if not one.finished), key=lambda one: one.silent > SILENT)
        return self._status(going, over=self._over(standings), done=done, planned=len(planned))

    def _over(self, standings: list[LiveRun]) -> bool:
        planned = ongoing.read_planned(self.folder)
        done = {one.name for one in standings if one.finished}
        return bool(planned) and done.issuperset([*planned, *(one.name for one in standings)])

    def _status(self, standings: list[LiveRun], *, over: bool, done: int = 0, planned: int = 0) -> str:
        return render("live_status.html.j2", live=True, runs=standings, done=done, planned=planned, over=over)

    def _standings(self) -> list[LiveRun]:
        return [LiveRun.of(path, self._read(path)) for path in self._folders()]

    def _made(self, key: str, state: object, make: Callable[[], str]) -> str:
        known = self._kept.get(key)
        if known is not None and (known[0] == state or time.monotonic() < known[1]):
            return known[2]
        began = time.monotonic()
        text = make()
        now = time.monotonic()
        self._kept[key] = state, now + AT_ONCE * (now - began), text
        return text
