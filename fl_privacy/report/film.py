"""Show an attack as a film: its guesses frame by frame next to the attacker's loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from markupsafe import Markup

from fl_privacy.report.charts import Curve, line_chart
from fl_privacy.report.gallery import Piece, colored, data_uri, place_of, uncolored
from fl_privacy.runs.folder import Attacker, Film, Pair, Run, Sentence, TextFilm
from fl_privacy.types.film import FRAMES

T = TypeVar("T")
VICTIMS_SHOWN = 3  # victims shown per attacker; ``films`` may record more


@dataclass(frozen=True, kw_only=True)
class Reel:
    """A victim's part of a film."""

    where: str
    member: str  # sub-attack of the frames, or empty
    original: str | Sequence[Piece]  # PNG as a data URI, or a text's tokens; empty if not known
    # ``FRAMES`` PNGs as data URIs, or tokens of each frame, right, misplaced or wrong
    frames: Sequence[str | Sequence[Piece]]
    small: bool = False
    template: Literal["picture", "text"] = "picture"


@dataclass(frozen=True, kw_only=True)
class Screening:
    """Film of one attacker in one round: victims played together; ``moments`` are shares of the work, in words."""

    title: str
    reels: Sequence[Reel]
    moments: Sequence[str]
    chart: Markup


def films_of_run(
    run: Run,
    films: Mapping[Attacker, Sequence[Film]],
    pairs: Mapping[tuple[str, int], Pair],
    sentences: Mapping[tuple[str, int], Sentence],
) -> list[Screening]:
    """Return a screening for each attacker, of its last filmed round."""
    found = []
    for attacker, of_attacker in films.items():
        images = {(v["id"], v["image"]): v for v in run.of_kind("image", attacker)}
        losses = {h["id"]: h["loss"] for h in run.of_kind("history", attacker)}
        known = [f for f in of_attacker if (f.id, f.image) in images and len(losses.get(f.id, ())) > max(f.at) > 0]
        if known:
            last = max(images[f.id, f.image]["round"] for f in known)
            shown = [f for f in known if images[f.id, f.image]["round"] == last][:VICTIMS_SHOWN]
            title = f"{attacker.capitalize()} attacker" if len(films) > 1 else ""
            truths = [(sentences if isinstance(f, TextFilm) else pairs).get((f.id, f.image)) for f in shown]
            reels = [_reel(f, images[f.id, f.image], truth) for f, truth in zip(shown, truths, strict=True)]
            moments, chart = _losses(shown, [losses[film.id] for film in shown], [reel.where for reel in reels])
            found.append(Screening(title=title, reels=reels, moments=moments, chart=chart))
    return found


def _reel(film: Film, image: Mapping[str, object], truth: Any) -> Reel:
    original = None if truth is None else truth.original
    if isinstance(film, TextFilm):
        frames = [colored(_spread(film.frames, k), original) for k in range(FRAMES)]
        place, tokens = place_of(image, "text"), uncolored(original or ())
        return Reel(where=place, member=film.member, original=tokens, frames=frames, template="text")
    return Reel(
        where=place_of(image),
        member=film.member,
        original="" if original is None else data_uri(original),
        frames=[data_uri(_spread(film.frames, k)) for k in range(FRAMES)],
        small=max(film.frames[0].shape[1:]) <= 96,
    )


def _spread(frames: Sequence[T], moment: int) -> T:
    return frames[round(moment * (len(frames) - 1) / (FRAMES - 1))]


def _losses(
    films: Sequence[Film], losses: Sequence[Sequence[float | None]], names: Sequence[str]
) -> tuple[list[str], Markup]:
    curves, marks = [], []
    for film, history, name in zip(films, losses, names, strict=True):
        x = [100 * k / (len(history) - 1) for k in range(len(history))]
        y = [float("nan") if value is None else value for value in history]
        places = [_spread(film.at, k) for k in range(FRAMES)]
        curves.append(Curve(x=x, y=y, label=name))
        marks.append([(x[place], y[place]) for place in places])
    mean = [sum(x for x, _ in of_moment) / len(of_moment) for of_moment in zip(*marks, strict=True)]
    chart = line_chart(
        curves,
        x="Share of the iterations, percent",
        y="Attack loss",
        log=all(value > 0 for curve in curves for value in curve.y),
        alt=f"The attacker's own loss on {', '.join(names)}, with {FRAMES} moments marked",
        marks=marks,
    )
    return [f"{share:.0f} %" for share in mean], chart
