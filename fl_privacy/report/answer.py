"""Which defense keeps leakage below a bound at the highest accuracy, in a sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.metrics import THRESHOLDS
from fl_privacy.report.numbers import metric, percent, points

RECOGNIZABLE = next(t.value for t in THRESHOLDS if t.metric == "psnr")
"""Decibel."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train, attacked in all ways that were tried.

    Attributes:
        name: in words.
        accuracy: in the end, in [0, 1].
        pmm: in percent of the undefended accuracy, ``None`` where that is unknown.
        psnr: mean PSNR of the attack that leaked most, in dB.
    """

    name: str
    accuracy: float
    pmm: float | None
    psnr: float


def best_below(candidates: Sequence[Candidate], psnr_below: float) -> Candidate | None:
    """The most accurate of those whose PSNR is below ``psnr_below`` dB; of equals the one that leaks less."""
    private = [c for c in candidates if c.psnr < psnr_below]
    return max(private, key=lambda c: (c.accuracy, -c.psnr), default=None)


def answer(candidates: Sequence[Candidate], psnr_below: float) -> str:
    """A sentence; empty where nothing was both trained and attacked."""
    if not candidates:
        return ""
    bound = metric(psnr_below, "psnr")
    best = best_below(candidates, psnr_below)
    if best is None:
        least = min(candidates, key=lambda c: c.psnr)
        return f"None keeps the mean PSNR below {bound}; {least.name} comes closest ({metric(least.psnr, 'psnr')})."
    kept = f", {points(best.pmm)} of the undefended" if best.pmm is not None else ""
    price = f"accuracy {percent(best.accuracy)}{kept}; PSNR {metric(best.psnr, 'psnr')}"
    number = sum(c.psnr < psnr_below for c in candidates)
    if number == 1:
        return f"Of {len(candidates)}, only {best.name} keeps the mean PSNR below {bound} ({price})."
    return (
        f"{number} of {len(candidates)} keep the mean PSNR below {bound}; the most accurate of them is {best.name}"
        f" ({price})."
    )
