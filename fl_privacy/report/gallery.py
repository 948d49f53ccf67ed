"""The attacked images of a run as a page shows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_privacy.metrics.registry import IMAGE_METRIC
from fl_privacy.report.images import data_uri
from fl_privacy.report.numbers import metric, title
from fl_privacy.results import Attacker, Pair, Run
from fl_privacy.victim_ids import Certainty

SHOWN = 300
"""A page with more images gets too heavy to open."""
CAPTION = ("psnr", "transformed_psnr", "ssim", "lpips")


@dataclass(frozen=True, kw_only=True)
class ImageView:
    """One attacked image.

    Attributes:
        rank: ``Best``, ``Median``, ``Worst`` read, or empty.
        where: round, client and image in words.
        figures: its metrics in words.
        label: whether the class was found, in words, whether the attacker is sure, and what read the image.
        failure: why there is no reconstruction.
        original: PNG as a data URI, empty if the picture was lost or nobody knows it.
        transformed: likewise, what the defense put in place of the original; empty if it did not.
        guess: likewise, of the plain attacker.
        adaptive: likewise, of the adaptive attacker.
        adaptive_figures: metrics of the adaptive attacker's, or why it failed; empty if there was none.
        small: whether its pixels should be shown as squares.
        known: whether the original is known.
    """

    rank: str = ""
    where: str
    figures: str
    label: str
    failure: str | None
    original: str
    guess: str
    transformed: str = ""
    adaptive: str = ""
    adaptive_figures: str = ""
    small: bool
    known: bool = True

    @property
    def alt(self) -> str:
        """The image in words."""
        return f"{self.where}; {self.figures}" if self.figures else self.where


def view_all(run: Run, pairs: Mapping[tuple[str, int], Pair]) -> list[ImageView]:
    """The first ``SHOWN`` attacked images in the order they were recorded."""
    adaptive = _adaptive_images(run)
    return [_view(image, pairs, adaptive) for image in run.of_kind("image")[:SHOWN]]


def view_extremes(run: Run, pairs: Mapping[tuple[str, int], Pair]) -> list[ImageView]:
    """The image that was read best, the median and the worst by PSNR, as far as there are that many."""
    ranked = rank_by(run, IMAGE_METRIC)
    places = {"Best": 0, "Median": len(ranked) // 2, "Worst": len(ranked) - 1}
    if len(ranked) < 3:
        places = dict(list({"Best": 0, "Worst": len(ranked) - 1}.items())[: len(ranked)])
    adaptive = _adaptive_images(run)
    return [_view(ranked[place], pairs, adaptive, rank) for rank, place in places.items()]


def rank_by(run: Run, metric_name: str) -> list[Mapping[str, Any]]:
    """Attacked examples that anyone read, each by the attacker that read it better by a metric of which high values
    leak; the one read best first."""
    adaptive = _adaptive_images(run)
    ranked = []
    for image in run.of_kind("image"):
        both = (image, adaptive.get((image["id"], image["image"]), {}))
        found = [v[metric_name] for v in both if v.get("failure") is None and v.get(metric_name) is not None]
        if found:
            ranked.append((max(found), image))
    return [image for _, image in sorted(ranked, key=lambda pair: -pair[0])]


def gallery_title(run: Run) -> str:
    """How many images were attacked, and in how many rounds; what is attacked twice is one image."""
    attacked = run.of_kind("image")
    rounds = sorted({image["round"] for image in attacked})
    images = {(str(v["id"]).removeprefix(f"round-{v['round']}/"), v["image"]) for v in attacked}
    if len(rounds) < 2 or not all("victim-" in str(v["id"]) for v in attacked):
        return f"All {len(attacked)} attacked images"
    if len(rounds) > 5:
        return f"All {len(images)} attacked images, in {len(rounds)} rounds"
    return f"All {len(images)} attacked images, in rounds {', '.join(map(str, rounds[:-1]))} and {rounds[-1]}"


def caption(image: Mapping[str, Any]) -> str:
    """The main metrics of an image in words; where the original is not known, the attacker's own loss."""
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
    failed = image.get("failure")
    original = pair.original if pair else None
    shown = original if pair is None or original is not None else pair.guess
    return ImageView(
        rank=rank,
        where=f"Round {image['round']}, {place_of(image)}",
        figures=caption(image),
        label="" if failed else ", ".join(filter(None, [whose_label(image), certainty_of(image), image["member"]])),
        failure=failed,
        original="" if original is None else data_uri(original),
        transformed=data_uri(pair.transformed) if pair and pair.transformed is not None else "",
        guess=data_uri(pair.guess) if pair and pair.guess is not None else "",
        adaptive=data_uri(pair.adaptive) if pair and pair.adaptive is not None else "",
        adaptive_figures=(adaptive["failure"] or caption(adaptive)) if adaptive else "",
        small=shown is not None and max(shown.shape[1:]) <= 96,
        known="label" not in image,
    )


def whose_label(image: Mapping[str, Any]) -> str:
    """Whether the class was found, in words; empty where that is not known."""
    if (found := image.get("label")) is not None:
        return f"taken for class {found}"
    right = image.get("label_correct")
    return "" if right is None else "label found" if right else "label wrong"


def certainty_of(image: Mapping[str, Any]) -> str:
    """How sure the attacker is, in words; empty where it is not."""
    return "" if image["certainty"] == Certainty.APPROXIMATE else str(image["certainty"])


def place_of(image: Mapping[str, Any], kind: str = "image") -> str:
    """Whose and which of a victim's examples, in words."""
    names = [f"client {image['client']}", str(image["id"]).rpartition("/")[2].replace("-", " ")]
    return ", ".join([*dict.fromkeys(names), *([f"{kind} {image['image']}"] if image["image"] else [])])
