"""Show a run's attacked images, texts and table rows on a page."""

from __future__ import annotations

import base64
import io
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from markupsafe import Markup
from PIL import Image, ImageDraw, ImageFont

from fl_privacy.files import make_private_folder, write_private
from fl_privacy.measure.registry import IMAGE_METRIC, TABLE_METRIC
from fl_privacy.report.charts import Curve, line_chart
from fl_privacy.report.headline import capital
from fl_privacy.report.words import metric, title
from fl_privacy.runs.folder import Film, Pair, Run, Sentence, TextFilm
from fl_privacy.runs.folder.pictures import Pixels, RowGuess, RowPair
from fl_privacy.types.film import FRAMES
from fl_privacy.types.modality import as_shown
from fl_privacy.types.victim_ids import Attacker, Certainty

PAIRS_IN_A_ROW = 4
_IMAGE, _LINE, _MARGIN, _LETTER, _FONT = 195, 21, 8, 9, 17
"""Pixels of an image, of a line above it, of the margin, of a letter, and of the font's size."""


def data_uri(image: Pixels) -> str:
    """Encode ``image`` as a PNG data URI."""
    file = io.BytesIO()
    Image.fromarray(_rows(image)).save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def grid_picture(
    originals: Sequence[Pixels | None],
    reconstructions: Sequence[Pixels | None],
    captions: Sequence[str],
    path: Path,
    *,
    adaptive: Sequence[Pixels | None] | None = None,
    transformed: Sequence[Pixels | None] | None = None,
) -> None:
    """Write a PNG of originals next to their reconstructions, with captions, readable only by its owner.

    In a row: original, ``transformed`` image, reconstruction, guess of the ``adaptive`` attacker; ``None``: left empty.
    """
    columns = min(PAIRS_IN_A_ROW, len(originals))
    rows = -(-len(originals) // columns)
    series = [images for images in (transformed, reconstructions, adaptive) if images is not None]
    width = _IMAGE * (1 + len(series))
    titles = [textwrap.fill(caption, width // _LETTER) for caption in captions]
    over = _LINE * (1 + max((title.count("\n") + 1 for title in titles), default=1))
    picture = Image.new("RGB", (width * columns, (_IMAGE + over) * rows), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_FONT)
    for number, (original, others, words) in enumerate(zip(originals, zip(*series, strict=True), titles, strict=False)):
        like = next((image for image in (original, *others) if image is not None), None)
        if like is None:
            continue
        empty = np.full_like(like, 255)
        gap = np.full_like(like[:, :, : max(1, like.shape[2] // 16)], 255)
        shown = [part for other in others for part in (gap, empty if other is None else other)]
        cell = Image.fromarray(_rows(np.concatenate([empty if original is None else original, *shown], axis=2)))
        row, column = divmod(number, columns)
        scale = min((width - 2 * _MARGIN) / cell.width, (_IMAGE - _MARGIN) / cell.height)
        size = max(1, round(scale * cell.width)), max(1, round(scale * cell.height))
        middle, top = width * column + width // 2, (_IMAGE + over) * row + over
        cell = cell.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
        picture.paste(cell, (middle - size[0] // 2, top))
        draw.multiline_text((middle, top - _MARGIN), words, "black", font, anchor="md", align="center")
    file = io.BytesIO()
    picture.save(file, format="PNG")
    make_private_folder(path.parent, path.parent)
    write_private(path, file.getvalue())


def _rows(image: Pixels) -> Pixels:
    if image.shape[0] >= 3:
        return np.ascontiguousarray(image[:3].transpose(1, 2, 0))
    return image.astype(np.float32).mean(0).round().astype(np.uint8)


SHOWN = 300  # most images of a page, so that browsers can open it
CAPTION = ("psnr", "transformed_psnr", "ssim", "lpips")
_CERTAIN = {Certainty.PROVEN: "proven", Certainty.CONSISTENT: "reproduces the upload"}


def views(run: Run, pairs: Mapping[tuple[str, int], Pair]) -> tuple[list[dict[str, Any]], Iterator[dict[str, Any]]]:
    """Return the page's data on the best, median and worst image by PSNR, and an iterator over the first ``SHOWN``."""
    adaptive = _adaptive_images(run)
    best = [_view(image, pairs, adaptive, rank) for rank, image in extremes(rank_by(run, IMAGE_METRIC))]
    return best, (_view(image, pairs, adaptive) for image in run.of_kind("image")[:SHOWN])


def extremes(ranked: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (rank, example) of the best, median and worst of ``ranked``; fewer if there are fewer than three."""
    places = {"Best": 0, "Median": len(ranked) // 2, "Worst": len(ranked) - 1}
    ranks = ("Best", "Median", "Worst") if len(ranked) > 2 else ("Best", "Worst")[: len(ranked)]
    return [(rank, ranked[places[rank]]) for rank in ranks]


def described(record: Mapping[str, Any], kind: str, metrics: Sequence[str], more: Sequence[str] = ()) -> dict[str, Any]:
    """Return the page's data on an ``image``, ``text`` or ``row`` (``kind``): origin, caption, label, failure."""
    right, certainty, place = record.get("label_correct"), record["certainty"], place_of(record, kind)
    label = "" if right is None else "label found" if right else "label wrong"
    if (taken := record.get("label")) is not None:
        label = f"taken for class {taken}"
    by = f"by the attack {name}" if (name := record["member"]) else ""
    return {
        "where": f"Round {record['round']}, {place}" if record["round"] else capital(place),
        "figures": caption(record, metrics, more),
        "label": "" if record.get("failure") else ", ".join(filter(None, (label, _CERTAIN.get(certainty), by))),
        "failure": record.get("failure"),
    }


def rank_by(run: Run, metric_name: str) -> list[Mapping[str, Any]]:
    """Return the results of all examples, most leaked first by a metric; of two attackers, the stronger counts."""
    adaptive = _adaptive_images(run)
    ranked = []
    for image in run.of_kind("image"):
        both = (image, adaptive.get((image["id"], image["image"]), {}))
        found = [v[metric_name] for v in both if v.get("failure") is None and v.get(metric_name) is not None]
        if found:
            ranked.append((max(found), image))
    return [image for _, image in sorted(ranked, key=lambda pair: -pair[0])]


def from_many(ranked: Sequence[Mapping[str, Any]], count: int, kind: str) -> list[Mapping[str, Any]]:
    """Choose ``count`` of the ``ranked`` examples (noun: ``kind``), best first, if possible of different uploads."""
    chosen: dict[str, Mapping[str, Any]] = {}
    for of in (lambda one: one["client"], lambda one: one["id"], lambda one: place_of(one, kind)):
        for one in ranked:
            if len(chosen) < count and not any(of(one) == of(other) for other in chosen.values()):
                chosen[place_of(one, kind)] = one
    return [one for one in ranked if any(one is other for other in chosen.values())]


def gallery_title(run: Run, kind: str) -> str:
    """Return a gallery's title: number and rounds of attacked examples; ``kind``: noun for one, such as ``image``."""
    attacked = run.of_kind("image")
    rounds = sorted({image["round"] for image in attacked})
    number, where = len({(str(v["id"]).removeprefix(f"round-{v['round']}/"), v["image"]) for v in attacked}), ""
    if len(rounds) < 2 or not all("victim-" in str(v["id"]) for v in attacked):
        number = len(attacked)
    elif len(rounds) > 5:
        where = f", in {len(rounds)} rounds"
    else:
        where = f", in rounds {', '.join(map(str, rounds[:-1]))} and {rounds[-1]}"
    return f"{f'The attacked {kind}' if number == 1 else f'All {number} attacked {kind}s'}{where}"


def caption(record: Mapping[str, Any], metrics: Sequence[str] = CAPTION, more: Sequence[str] = ()) -> str:
    """Return a caption of the ``metrics`` and phrases ``more``, or of the attack's loss if no original is known."""
    if record.get("label") is not None and record.get("attack_loss") is not None:
        return f"The attacker's own loss {record['attack_loss']:.3g}"
    figures = [f"{title(name)} {metric(record[name], name)}" for name in metrics if record.get(name) is not None]
    return ", ".join(figure.replace(" ", "\u00a0") for figure in [*figures, *more])  # no figure breaks over two lines


def _adaptive_images(run: Run) -> dict[tuple[str, int], Mapping[str, Any]]:
    return {(v["id"], v["image"]): v for v in run.of_kind("image", Attacker.ADAPTIVE)}


def _view(
    image: Mapping[str, Any],
    pairs: Mapping[tuple[str, int], Pair],
    adaptive_images: Mapping[tuple[str, int], Mapping[str, Any]],
    rank: str = "",
) -> dict[str, Any]:
    pair = pairs.get((image["id"], image["image"]))
    adaptive = adaptive_images.get((image["id"], image["image"]))
    pictures = {name: getattr(pair, name, None) for name in ("original", "guess", "transformed", "adaptive")}
    shown = pictures["guess"] if pictures["original"] is None else pictures["original"]
    view = described(image, "image", CAPTION)
    return {
        **view,
        **{name: "" if picture is None else data_uri(picture) for name, picture in pictures.items()},
        "alt": "; ".join(filter(None, (view["where"], view["figures"]))),
        "rank": rank,
        "adaptive_figures": (adaptive["failure"] or caption(adaptive)) if adaptive else "",
        "small": shown is not None and max(shown.shape[1:]) <= 96,
        "known": "label" not in image,
    }


def place_of(image: Mapping[str, Any], kind: str = "image") -> str:
    """Describe the client, the upload and the number of an example in words; ``kind``: noun for the example."""
    names = [f"client {image['client']}", str(image["id"]).rpartition("/")[2].replace("-", " ")]
    return ", ".join([*dict.fromkeys(names), *([f"{kind} {image['image']}"] if image["image"] else [])])


TEXT_CAPTION = ("token_f1", "rouge_l", "exact_match")
Kind = Literal["plain", "right", "misplaced", "wrong"]


@dataclass(frozen=True)
class Piece:
    """A token for display; ``glued`` is ``True`` if it continues the word before it."""

    text: str
    glued: bool
    kind: Kind


def extreme_sentences(run: Run, found: Mapping[tuple[str, int], Sentence], by: str) -> list[dict[str, Any]]:
    """Return the page's data on the best, median and worst text by metric ``by``; on any three texts if all are equal.

    ``found``: (victim id, example number) -> original and reconstructed text.
    """
    ranked = rank_by(run, by)
    if _equal(run, by):
        different = {place_of(record, "text"): record for record in reversed(ranked)}
        return [text_view(record, found) for record in list(different.values())[::-1][:3]]
    return [text_view(record, found, rank) for rank, record in extremes(ranked)]


def colored(guess: Sequence[str], original: Sequence[str] | None) -> list[Piece]:
    """Mark each token of ``guess`` as right in place, misplaced, or wrong; each original token counts once."""
    if original is None:
        return uncolored(guess)
    right = [at < len(original) and token == original[at] for at, token in enumerate(guess)]
    left = Counter(original) - Counter(token for token, is_right in zip(guess, right, strict=True) if is_right)
    pieces = []
    for token, is_right in zip(guess, right, strict=True):
        kind: Kind = "right" if is_right else "misplaced" if left[token] > 0 else "wrong"
        if kind == "misplaced":
            left[token] -= 1
        pieces.append(Piece(*as_shown(token), kind))
    return pieces


def uncolored(tokens: Sequence[str]) -> list[Piece]:
    """Convert ``tokens`` for display, without colors."""
    return [Piece(*as_shown(token), "plain") for token in tokens]


def text_view(record: Mapping[str, Any], found: Mapping[tuple[str, int], Sentence], rank: str = "") -> dict[str, Any]:
    """Return the page's data on an attacked text: tokens of the original (empty if unknown) and of the guesses.

    ``record``: its results. ``found``: (victim id, text number) -> original and guesses. ``rank``: such as ``Best``.
    """
    sentence = found.get((record["id"], record["image"]), Sentence(None))
    original = sentence.original
    return {
        **described(record, "text", TEXT_CAPTION),
        "rank": rank,
        "original": uncolored(original or ()),
        "guess": colored(sentence.guess or (), original),
        "adaptive": None if sentence.adaptive is None else colored(sentence.adaptive, original),
    }


ROW_CAPTION = ("cells_right", "categories_right", "numbers_right")
SURE = 0.9  # least certainty of a cell shown as certain
_RANKS = ("Best", "Second", "Third")


def best_rows(run: Run, found: Mapping[tuple[str, int], RowPair]) -> list[dict[str, Any]]:
    """Return the page's data on three of the best reconstructed rows, from different clients and uploads if possible.

    ``found``: (victim id, example number) -> original and reconstructed row.
    """
    ranked = rank_by(run, TABLE_METRIC)
    shown = from_many(ranked, 3, "row")
    ranks = _RANKS if shown == ranked[:3] and not _equal(run, TABLE_METRIC) else ("", "", "")
    return [row_view(record, found, rank) for rank, record in zip(ranks, shown, strict=False)]


def best_rows_in_words(run: Run) -> str:
    """Describe how :func:`best_rows` chose its rows, and what share of cells guesses without the update get right."""
    shown, said = from_many(rank_by(run, TABLE_METRIC), 3, "row"), []
    if found := [r["control_cells"] for r in run.of_kind("image") if r.get("control_cells") is not None]:
        share = metric(sum(found) / len(found), TABLE_METRIC)
        said.append(f"Without the update, 95 % of guesses get at most {share} of a row's cells right on average.")
    if _equal(run, TABLE_METRIC) and len(shown) > 1:
        said.append("All rows have the same share of right cells.")
    else:
        ways = {"client": "client", "id": "upload"}
        alone = (way for key, way in ways.items() if len({record[key] for record in shown}) == len(shown) > 1)
        said += [f"Shown is the best row of each of {len(shown)} {way}s." for way in [next(alone, "")] if way]
    return " ".join(said)


def _equal(run: Run, by: str) -> bool:
    return len({record.get(by) for attacker in Attacker for record in run.of_kind("image", attacker)} - {None}) == 1


def row_view(record: Mapping[str, Any], found: Mapping[tuple[str, int], RowPair], rank: str = "") -> dict[str, Any]:
    """Return the page's data on an attacked table row: original (``?`` if unknown) and guessed cells of each column.

    ``record``: its results. ``found``: (victim id, row number) -> original and guesses. ``rank``: such as ``Best``.
    """
    pair = found.get((record["id"], record["image"]), RowPair(None))
    original, control = pair.original, record.get("control_cells")
    without = [] if control is None else [f"a guess without the update: up to {metric(control, TABLE_METRIC)}"]
    lines = [
        {
            "column": column,
            "original": original[k] if original is not None else "?",
            "guess": _cell(pair.guess, k, record),
            "adaptive": _cell(pair.adaptive, k, record),
        }
        for k, column in enumerate(pair.columns)
    ]
    view = described(record, "row", ROW_CAPTION, without) | {"rank": rank, "lines": lines}
    return view | {"known": original is not None, "adaptive": pair.adaptive is not None}


def _cell(guess: RowGuess | None, at: int, record: Mapping[str, Any]) -> dict[str, Any] | None:
    if guess is None:
        return None
    kind = "plain" if not guess.right else "right" if guess.right[at] else "wrong"
    proven = record.get("certainty") in ("proven", "consistent")
    return {"text": guess.cells[at], "kind": kind, "certain": proven or guess.certain[at] >= SURE}


T = TypeVar("T")
VICTIMS_SHOWN = 3  # victims shown per attacker; ``films`` may record more


@dataclass(frozen=True, kw_only=True)
class Reel:
    """Pictures of one attacked example in an animation: its original, and the guesses at some moments of the attack."""

    where: str
    member: str  # sub-attack of the frames, or empty
    original: str | Sequence[Piece]  # PNG as a data URI, or a text's tokens; empty if not known
    # ``FRAMES`` PNGs as data URIs, or tokens of each frame, right, misplaced or wrong
    frames: Sequence[str | Sequence[Piece]]
    small: bool = False
    template: Literal["picture", "text"] = "picture"


@dataclass(frozen=True, kw_only=True)
class Screening:
    """Animation of one attacker's reconstructions of several victims in a round; ``moments``: its frames' captions."""

    title: str
    reels: Sequence[Reel]
    moments: Sequence[str]
    chart: Markup


def films_of_run(
    run: Run, films: Mapping[Attacker, Sequence[Film]], pairs: Mapping[tuple[str, int], Pair | Sentence]
) -> list[Screening]:
    """Return one animation for each attacker, from the last round in which its reconstructions were recorded.

    ``pairs``: (victim id, example number) -> original and reconstruction.
    """
    found = []
    for attacker, of_attacker in films.items():
        images = {(v["id"], v["image"]): v for v in run.of_kind("image", attacker)}
        losses = {h["id"]: h["loss"] for h in run.of_kind("history", attacker)}
        known = [f for f in of_attacker if (f.id, f.image) in images and len(losses.get(f.id, ())) > max(f.at) > 0]
        if known:
            last = max(images[f.id, f.image]["round"] for f in known)
            shown = [f for f in known if images[f.id, f.image]["round"] == last][:VICTIMS_SHOWN]
            title = f"{attacker.capitalize()} attacker" if len(films) > 1 else ""
            reels = [_reel(f, images[f.id, f.image], pairs.get((f.id, f.image))) for f in shown]
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
