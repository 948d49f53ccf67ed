"""How far a run is, for whoever watches it: what its records say, without keeping them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fl_privacy.config.reading import select
from fl_privacy.errors import UserError
from fl_privacy.report.headline import Headline, headline_of
from fl_privacy.report.images import data_uri
from fl_privacy.report.numbers import percent, seconds
from fl_privacy.report.sentences import Piece, uncolored
from fl_privacy.results import Run, verdict_of
from fl_privacy.results.occupancy import IDENTITY, METRICS, SUMMARY
from fl_privacy.results.ongoing import PROGRESS, read_guesses, read_ongoing, read_texts
from fl_privacy.results.verdict import OPEN

LAST_ROUNDS = 5
"""By which the time left of a training is told."""

SILENT = 300.0
"""Seconds without news from which a run may have been killed."""

_WATCHED = (METRICS, SUMMARY, IDENTITY)
"""Files that change when a run records something."""


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
        texts: likewise, of an attack on texts: tokens of each.
    """

    name: str
    link: str
    finished: bool
    doing: str
    share: float | None
    left: float | None
    silent: float
    verdict: Headline
    guesses: Sequence[str] = ()
    texts: Sequence[Sequence[Piece]] = ()

    @classmethod
    def of(cls, path: Path, told: "Told | UserError") -> "LiveRun":
        """The run in ``path`` that ``told`` so much, or why it can't be read: the others of its folder can."""
        link = f"./{quote(path.name)}/report.html"
        if isinstance(told, UserError):
            return cls(
                name=path.name,
                link=link,
                finished=False,
                doing=str(told),
                share=None,
                left=None,
                silent=0.0,
                verdict=Headline("Not known", "", OPEN),
            )
        doing, share, left = _doing(path, told)
        hidden = told.finished or told.shared
        news = max(changed_at(path / name) for name in (*_WATCHED, PROGRESS))
        return cls(
            name=path.name,
            link=link,
            finished=told.finished,
            doing=doing,
            share=share,
            left=left,
            silent=max(0.0, time.time() - news),
            verdict=told.verdict,
            guesses=[] if hidden else [data_uri(image) for image in read_guesses(path)],
            texts=[] if hidden else [uncolored(text) for text in read_texts(path)],
        )

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


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a run's records said when they were last read, without the records: those of a sweep would fill memory.

    Attributes:
        finished: whether the run has.
        verdict: of what is recorded.
        pictured: whether images may be shown.
        attacked: examples that are recorded.
        rounds: that are trained.
        total: that it trains; ``None`` where it does not.
        last: seconds that the last of them took, each.
        shared: whether the folder is a copy made for others.
    """

    finished: bool
    verdict: Headline
    pictured: bool
    attacked: int
    rounds: int
    total: int | None
    last: tuple[float, ...]
    shared: bool

    @classmethod
    def by(cls, run: Run) -> "Told":
        """What ``run`` tells."""
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


def _doing(path: Path, told: Told) -> tuple[str, float | None, float | None]:
    """What a run does, the share of it that is done, and the seconds left."""
    if told.finished:
        return "Finished", 1.0, None
    if (ongoing := read_ongoing(path)) is not None:
        return ongoing.what, ongoing.share, ongoing.left
    if told.total is None:
        return f"Goes on, {told.attacked} attacked examples recorded", None, None
    if told.rounds >= told.total:
        return "Trained; goes on with what was intercepted", None, None
    left = (told.total - told.rounds) * sum(told.last) / len(told.last) if told.last else None
    return f"Training, round {told.rounds + 1} of {told.total}", told.rounds / told.total, left


def signature(path: Path) -> tuple[object, ...]:
    """Changes when the run in ``path`` has recorded something."""
    return tuple((changed_at(path / name), _size(path / name)) for name in _WATCHED)


def changed_at(path: Path) -> float:
    """When the file was, in seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
