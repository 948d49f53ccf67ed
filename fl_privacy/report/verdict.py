"""What a run showed, in a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fl_privacy.report.numbers import metric, title


@dataclass(frozen=True)
class Verdict:
    """A headline.

    Attributes:
        text: how many images are recognizable.
        basis: by which bound.
        tone: ``leak`` if any is, ``private`` if none is, ``open`` if nothing can be said.
    """

    text: str
    basis: str
    tone: Literal["leak", "private", "open"]


def verdict(summary: Mapping[str, Any]) -> Verdict:
    """The headline of a run, by PSNR."""
    images, failures = summary["images"], summary["failures"]
    if not images:
        return Verdict("No image was attacked", "", "open")
    bound = next((t for t in summary["thresholds"] if t["metric"] == "psnr"), None)
    if bound is None:
        return Verdict(f"The attack failed on {_all(images)}", "", "open")
    count, n = bound["recognizable"], bound["n"]
    basis = f"Recognizable means {bound_in_words(bound)} ({bound['source']})."
    if failures:
        basis += f" The attack failed on {failures} more, which count as neither."
    if n == 1:
        return Verdict(
            f"The attacked image is {'' if count else 'not '}recognizable", basis, "leak" if count else "private"
        )
    if count:
        return Verdict(f"{count} of {n} attacked images {'is' if count == 1 else 'are'} recognizable", basis, "leak")
    return Verdict(f"None of the {n} attacked images is recognizable", basis, "private")


def bound_in_words(bound: Mapping[str, Any]) -> str:
    """For example ``PSNR ≥ 15.0 dB``."""
    sign = "≥" if bound["leaks"] == "above" else "<"
    return f"{title(bound['metric'])} {sign} {metric(bound['value'], bound['metric'])}"


def _all(images: int) -> str:
    return "the only image" if images == 1 else f"all {images} images"
