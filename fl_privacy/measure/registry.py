"""Table of all metrics by name; importing it does not import PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from fl_privacy.checks.packages import registered_files
from fl_privacy.errors import UserError
from fl_privacy.files import shipped
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS

if TYPE_CHECKING:
    from torch import Tensor

    from fl_privacy.measure.images import MetricFunction

Of = Literal["images", "labels", "transformed", "texts", "words", "cells"]
LARGEST_PSNR = 100.0  # PSNR in dB above which images differ by less than float precision


def decimals(value: float) -> str:
    """Format ``value`` with three decimals."""
    return "∞" if math.isinf(value) else f"{value:z.3f}"


def decibel(value: float) -> str:
    """Format ``value``, in dB, with one decimal, capped at 100."""
    return f"> {LARGEST_PSNR:.0f}" if value > LARGEST_PSNR else f"{value:z.1f}"


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Published value of a metric at and beyond which a reconstruction counts as recognizable."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Metric of how close guesses are to their originals, and the interpretation of its values."""

    function: MetricFunction | None  # function (guesses, truths) -> (N,); ``None`` if a run supplies it
    of: Of = "images"
    """Compared data: images (N, C, H, W) in [0, 1], labels (N,), a defense's transformed images, texts (N, L) or their
    words, padded with -1, or cells: booleans (N, C), true for right cells, and for numeric ones."""

    leaks: Literal["high", "low"]  # ``high`` if better guesses have higher values, else ``low``
    range: tuple[float, float] = (0.0, math.inf)  # least and largest possible value
    threshold: Threshold | None = None  # published value from which an example counts as recognizable, if any
    title: str
    unit: str = ""
    digits: Callable[[float], str] = decimals  # function that formats a value without its unit
    description: str
    package: str | None = None  # optional package without which the metric is left out
    of_papers: bool = False  # ``True`` if the metric serves only comparisons with papers

    @property
    def available(self) -> bool:
        return self.package is None or find_spec(self.package) is not None

    @property
    def bound(self) -> float | None:
        return self.threshold.value if self.threshold else None

    @property
    def side(self) -> Literal["above", "below"]:
        return "above" if self.leaks == "high" else "below"

    @property
    def axis(self) -> str:
        return f"{self.title}{f', {self.unit}' if self.unit else ''} ({self.leaks} leaks)"

    @property
    def name_within(self) -> str:
        word = self.title.partition(" ")[0]
        return self.title[:1].lower() + self.title[1:] if word[1:].islower() else self.title

    def is_leak(self, value: float) -> bool:
        if self.threshold is None:
            return False
        return value >= self.threshold.value if self.leaks == "high" else value < self.threshold.value

    def in_words(self, value: float) -> str:
        return f"{self.digits(value)} {self.unit}".rstrip()


_DIGITS: dict[str, Callable[[float], str]] = {
    "decimals": decimals,
    "decibel": decibel,
    "percent": lambda share: f"{100 * share:.0f} %",
    "two digits": lambda value: f"{value:#.2g}",
}


def _metric(
    *,
    function: str = "",
    range: Sequence[float] = (0.0, math.inf),
    threshold: dict[str, Any] | None = None,
    digits: str = "decimals",
    **fields: Any,
) -> Metric:
    def values(guesses: Tensor, truths: Tensor) -> Tensor:
        module, name = function.split(":")
        found: Tensor = getattr(import_module(f"fl_privacy.measure.{module}"), name)(guesses, truths)
        return found

    return Metric(
        function=values if function else None,
        range=(range[0], range[1]),
        threshold=Threshold(**threshold) if threshold else None,
        digits=_DIGITS[digits],
        **fields,
    )


IMAGE_METRIC, TEXT_METRIC, TABLE_METRIC = IMAGES.metric, TEXTS.metric, ROWS.metric

_TABLE = shipped(__file__, "metrics.json")

METRICS: dict[str, Metric] = {
    **{name: _metric(**fields) for name, fields in _TABLE["metrics"].items()},
    **{name: getattr(import_module(file), name) for name, file in registered_files("fl_privacy.measure").items()},
}
"""Metrics by name, from ``metrics.json``. A file ``_NAME.py`` of this folder with a ``Metric`` called ``NAME`` is
registered, too; it should import PyTorch inside its function only."""

NOT_METRICS = frozenset(_TABLE["not_metrics"])  # names of other fields of an image's record, which no metric may have


def register_metric(name: str, metric: Metric) -> None:
    """Add ``metric`` to ``METRICS``; ``UserError`` if ``name`` is taken or not an identifier."""
    if not name.isidentifier() or name in NOT_METRICS:
        raise UserError(f"A metric's name is expected to be a free identifier, but got {name!r}; try my_metric.")
    if METRICS.setdefault(name, metric) is not metric:
        raise UserError(f"A metric's name is expected to be new, but {name!r} is taken; choose another one.")
