"""What a run showed, in a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fl_privacy.report.numbers import metric, title

Tone = Literal["leak", "private", "open"]


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
    tone: Tone


def verdict(summary: Mapping[str, Any]) -> Verdict:
    """The headline of a run, by PSNR: what the plain attacker shows, and beside it the adaptive one."""
    plain, adaptive = _verdict(summary), summary.get("adaptive")
    if adaptive is None:
        return plain
    other = _verdict(adaptive)
    tone: Tone = "leak" if "leak" in (plain.tone, other.tone) else plain.tone if other.tone == "open" else other.tone
    told = f"{plain.text}; to an attacker that knows the defense: {other.text[0].lower()}{other.text[1:]}"
    return Verdict(told, plain.basis or other.basis, tone)


def _verdict(summary: Mapping[str, Any]) -> Verdict:
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
