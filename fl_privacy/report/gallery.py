"""Show the attacked images of a run on a page, and in one picture."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fl_privacy.files import make_private_folder, write_private
from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.report.words import metric, title
from fl_privacy.runs.folder import Attacker, Pair, Run
from fl_privacy.runs.folder.pictures import Pixels
from fl_privacy.types.victim_ids import Certainty

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
    """Write a PNG of originals next to reconstructions, captioned, readable only by its owner.

    ``None`` leaves a place empty. Images that the model saw instead of the originals come after these, guesses of the
    adaptive attacker last.
    """
    columns = min(PAIRS_IN_A_ROW, len(originals))
    rows = -(-len(originals) // columns)
    beside = [images for images in (transformed, reconstructions, adaptive) if images is not None]
    width = _IMAGE * (1 + len(beside))
    titles = [textwrap.fill(caption, width // _LETTER) for caption in captions]
    over = _LINE * (1 + max((title.count("\n") + 1 for title in titles), default=1))
    picture = Image.new("RGB", (width * columns, (_IMAGE + over) * rows), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_FONT)
    for number, (original, others, words) in enumerate(zip(originals, zip(*beside, strict=True), titles, strict=False)):
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
    """Arrange pixels as (H, W) or (H, W, 3); further channels are left out, two are averaged."""
    if image.shape[0] >= 3:
        return np.ascontiguousarray(image[:3].transpose(1, 2, 0))
    return image.astype(np.float32).mean(0).round().astype(np.uint8)


SHOWN = 300
"""Most images of a page, so that browsers can open it."""
CAPTION = ("psnr", "transformed_psnr", "ssim", "lpips")


@dataclass(frozen=True, kw_only=True)
class ExampleView:
    """One attacked example in words; ``rank`` is that of the few that are shown first, or empty."""

    rank: str = ""
    where: str
    figures: str
    label: str
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class ImageView(ExampleView):
    """One attacked image; pictures are PNGs as data URIs, empty if not available."""

    original: str
    guess: str
    transformed: str
    adaptive: str
    adaptive_figures: str
    small: bool
    known: bool

    @property
    def alt(self) -> str:
        return f"{self.where}; {self.figures}" if self.figures else self.where


def view_all(run: Run, pairs: Mapping[tuple[str, int], Pair]) -> list[ImageView]:
    """View the first ``SHOWN`` attacked images."""
    adaptive = _adaptive_images(run)
    return [_view(image, pairs, adaptive) for image in run.of_kind("image")[:SHOWN]]


def view_extremes(run: Run, pairs: Mapping[tuple[str, int], Pair]) -> list[ImageView]:
    """View the best, median and worst reconstruction by PSNR, if there are that many."""
    adaptive = _adaptive_images(run)
    return [_view(image, pairs, adaptive, rank) for rank, image in extremes(rank_by(run, IMAGE_METRIC))]


def extremes(ranked: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the best, median and worst of ``ranked`` with their ranks, if there are that many."""
    places = {"Best": 0, "Median": len(ranked) // 2, "Worst": len(ranked) - 1}
    ranks = ("Best", "Median", "Worst") if len(ranked) > 2 else ("Best", "Worst")[: len(ranked)]
    return [(rank, ranked[places[rank]]) for rank in ranks]


def described(record: Mapping[str, Any], kind: str, metrics: Sequence[str], more: Sequence[str] = ()) -> dict[str, Any]:
    """Return place, known ``metrics`` and ``more`` figures, label and failure of an example, as fields of its view."""
    figures = [f"{title(name)} {metric(record[name], name)}" for name in metrics if record.get(name) is not None]
    said = [whose_label(record), certainty_of(record), record["member"]]
    return {
        "where": f"Round {record['round']}, {place_of(record, kind)}",
        "figures": " · ".join(figure.replace(" ", "\u00a0") for figure in [*figures, *more]),
        "label": "" if record.get("failure") else ", ".join(filter(None, said)),
        "failure": record.get("failure"),
    }


def rank_by(run: Run, metric_name: str) -> list[Mapping[str, Any]]:
    """Rank attacked examples by their better attacker, best first; high values of the metric must leak."""
    adaptive = _adaptive_images(run)
    ranked = []
    for image in run.of_kind("image"):
        both = (image, adaptive.get((image["id"], image["image"]), {}))
        found = [v[metric_name] for v in both if v.get("failure") is None and v.get(metric_name) is not None]
        if found:
            ranked.append((max(found), image))
    return [image for _, image in sorted(ranked, key=lambda pair: -pair[0])]


def from_many(ranked: Sequence[Mapping[str, Any]], count: int, kind: str) -> list[Mapping[str, Any]]:
    """Choose ``count`` examples of ``ranked``: the best of each client, then of each upload, then the others."""
    chosen: dict[str, Mapping[str, Any]] = {}
    for of in (lambda one: one["client"], lambda one: one["id"], lambda one: place_of(one, kind)):
        for one in ranked:
            if len(chosen) < count and not any(of(one) == of(other) for other in chosen.values()):
                chosen[place_of(one, kind)] = one
    return [one for one in ranked if any(one is other for other in chosen.values())]


def gallery_title(run: Run) -> str:
    """Describe the number of attacked images and rounds."""
    attacked = run.of_kind("image")
    rounds = sorted({image["round"] for image in attacked})
    images = {(str(v["id"]).removeprefix(f"round-{v['round']}/"), v["image"]) for v in attacked}
    if len(rounds) < 2 or not all("victim-" in str(v["id"]) for v in attacked):
        return f"All {len(attacked)} attacked images"
    if len(rounds) > 5:
        return f"All {len(images)} attacked images, in {len(rounds)} rounds"
    return f"All {len(images)} attacked images, in rounds {', '.join(map(str, rounds[:-1]))} and {rounds[-1]}"


def caption(image: Mapping[str, Any]) -> str:
    """Caption an image with its main metrics, or with the attacker's loss if the original is not known."""
    if image.get("label") is not None and image.get("attack_loss") is not None:
        return f"The attacker's own loss {image['attack_loss']:.3g}"
    return " · ".join(f"{title(name)} {metric(image[name], name)}" for name in CAPTION if image.get(name) is not None)


def _adaptive_images(run: Run) -> dict[tuple[str, int], Mapping[str, Any]]:
    return {(v["id"], v["image"]): v for v in run.of_kind("image", Attacker.ADAPTIVE)}


def _view(
    image: Mapping[str, Any],
    pairs: Mapping[tuple[str, int], Pair],
    adaptive_images: Mapping[tuple[str, int], Mapping[str, Any]],
    rank: str = "",
) -> ImageView:
    pair = pairs.get((image["id"], image["image"]))
    adaptive = adaptive_images.get((image["id"], image["image"]))
    pictures = {name: getattr(pair, name, None) for name in ("original", "guess", "transformed", "adaptive")}
    shown = pictures["guess"] if pictures["original"] is None else pictures["original"]
    return ImageView(
        **{**described(image, "image", ()), "figures": caption(image)},
        **{name: "" if picture is None else data_uri(picture) for name, picture in pictures.items()},
        rank=rank,
        adaptive_figures=(adaptive["failure"] or caption(adaptive)) if adaptive else "",
        small=shown is not None and max(shown.shape[1:]) <= 96,
        known="label" not in image,
    )


def whose_label(image: Mapping[str, Any]) -> str:
    """Return the caption's words on the label; empty if not known."""
    if (found := image.get("label")) is not None:
        return f"taken for class {found}"
    right = image.get("label_correct")
    return "" if right is None else "label found" if right else "label wrong"


def certainty_of(image: Mapping[str, Any]) -> str:
    """Return the attacker's certainty; empty if approximate."""
    return "" if image["certainty"] == Certainty.APPROXIMATE else str(image["certainty"])


def place_of(image: Mapping[str, Any], kind: str = "image") -> str:
    """Return client, victim and number of an example in words."""
    names = [f"client {image['client']}", str(image["id"]).rpartition("/")[2].replace("-", " ")]
    return ", ".join([*dict.fromkeys(names), *([f"{kind} {image['image']}"] if image["image"] else [])])
