"""Table of all metrics by name; importing it does not import PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from fl_privacy.checks.packages import registered_files
from fl_privacy.errors import UserError
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
    """Published value of a metric from which on a reconstruction counts as recognizable."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Metric and its interpretation.

    Attributes:
        function: function (guesses, truths) -> (N,); ``None`` if a run supplies it.
        of: compared data: images (N, C, H, W) in [0, 1], labels (N,), a defense's transformed images, texts (N, L) or
            their words, padded with -1, or right cells (N, C) of rows.
        leaks: ``low`` if better guesses have lower values, else ``high``.
        range: least and largest possible value.
        threshold: threshold of recognizable examples, if published.
        digits: function that formats a value without its unit.
        package: optional package without which the metric is left out.
        of_papers: ``True`` if the metric serves only comparisons with papers.
    """

    function: MetricFunction | None
    of: Of = "images"
    leaks: Literal["high", "low"]
    range: tuple[float, float] = (0.0, math.inf)
    threshold: Threshold | None = None
    title: str
    unit: str = ""
    digits: Callable[[float], str] = decimals
    description: str
    package: str | None = None
    of_papers: bool = False

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


def _in(module: str, name: str) -> MetricFunction:
    def function(guesses: Tensor, truths: Tensor) -> Tensor:
        found: Tensor = getattr(import_module(f"fl_privacy.measure.{module}"), name)(guesses, truths)
        return found

    return function


IMAGE_METRIC, TEXT_METRIC, TABLE_METRIC = IMAGES.metric, TEXTS.metric, ROWS.metric

_DECIBELS: dict[str, Any] = {"leaks": "high", "unit": "dB", "digits": decibel}
_SIMILARITY: dict[str, Any] = {"leaks": "high", "range": (-1.0, 1.0)}
_RECOGNIZABLE_PSNR = Threshold(value=15.0, source="Refiner")

_SHARES: tuple[tuple[str, Of, str, str], ...] = (
    ("token_f1", "texts", "Token F1", "Harmonic mean of precision and recall of the tokens, wherever they are."),
    ("token_precision", "texts", "Token precision", "Share of the guessed tokens that are in the text."),
    ("token_recall", "texts", "Token recall", "Share of the text's tokens that were guessed."),
    ("rouge_1", "words", "ROUGE-1", "F1 of words."),
    ("rouge_2", "words", "ROUGE-2", "F1 of pairs of neighboring words."),
    ("rouge_l", "words", "ROUGE-L", "F1 of the longest common subsequence of words."),
    ("exact_match", "texts", "Exact", "Share of texts reconstructed word for word."),
    ("word_f1", "words", "Words F1", "F1 of the different words inferred from an upload, in any order."),
    ("word_precision", "words", "Words precision", "Share of the different inferred words that are in the texts."),
    ("word_recall", "words", "Words recall", "Share of the texts' different words that were inferred."),
    ("count_f1", "words", "Word counts F1", "F1 of the inferred words, each as often as it occurs."),
    (
        "cells_right",
        "cells",
        "Cells right",
        "Share of a row's cells reconstructed: categories equal, numbers within 0.319 deviations.",
    ),
    ("categories_right", "cells", "Categories right", "Share of a row's categories reconstructed."),
    (
        "numbers_right",
        "cells",
        "Numbers right",
        "Share of a row's numbers reconstructed within 0.319 standard deviations.",
    ),
    ("row_right", "cells", "Row right", "Share of rows with all cells reconstructed."),
    (
        "label_correct",
        "labels",
        "Label accuracy",
        "Share of the labels recovered; in a batch, each guessed label counts once.",
    ),
)
"""Name, compared data, title and description of each metric that is a share."""

_MODULES = {"texts": "texts", "words": "texts", "cells": "tables", "labels": "matching"}
_OF_BAGS = {"word_f1", "word_precision", "word_recall", "count_f1"}
"""Metrics of unordered words, which a run supplies."""

_SELDOM = {"token_precision", "rouge_1", "rouge_2", "word_precision", "count_f1"}
"""Metrics of texts that serve only comparisons with papers."""

METRICS: dict[str, Metric] = {
    "psnr": Metric(
        function=_in("images", "psnr"),
        **_DECIBELS,
        threshold=_RECOGNIZABLE_PSNR,
        title="PSNR",
        description="Peak signal-to-noise ratio on [0, 1].",
    ),
    "ssim": Metric(
        function=_in("images", "ssim"),
        **_SIMILARITY,
        threshold=Threshold(value=0.5, source="Refiner"),
        title="SSIM",
        description="Structural similarity, Gaussian window of 11 pixels.",
    ),
    "lpips": Metric(
        function=_in("lpips", "lpips"),
        leaks="low",
        threshold=Threshold(value=0.05, source="Refiner"),
        title="LPIPS",
        description="Perceptual distance in the features of AlexNet.",
        package="lpips",
    ),
    "mse": Metric(
        function=_in("images", "mse"),
        leaks="low",
        range=(0.0, 1.0),
        threshold=Threshold(value=0.05, source="FDL-PP"),
        title="MSE",
        digits=lambda value: f"{value:#.2g}",
        description="Mean squared error of the pixels (BPMSE).",
        of_papers=True,
    ),
    "bpki": Metric(
        function=_in("images", "bpki"),
        leaks="high",
        title="BPKI",
        description="Bayesian privacy loss: divergence KL(uniform, guess) of histograms of pixel values, with 10 bins"
        " and one pixel added to each unless bpki sets others. Values up to 0.3 count as safe.",
        of_papers=True,
    ),
    "rmse": Metric(
        function=_in("images", "rmse"),
        leaks="low",
        title="rMSE",
        description="Error relative to the image, ||guess - x|| / ||x||.",
        of_papers=True,
    ),
    "likeness": Metric(
        function=None,
        leaks="high",
        range=(0.0, 1.0),
        title="Likeness",
        description="Correlation of guess and original after the best harmless change (negative, brightness,"
        " contrast, mirror image, shift, blur, or one half alone).",
    ),
    "aligned_psnr": Metric(
        function=None,
        **_DECIBELS,
        title="Aligned PSNR",
        description="Peak signal-to-noise ratio after the best harmless change.",
        of_papers=True,
    ),
    "aligned_ssim": Metric(
        function=None,
        **_SIMILARITY,
        title="Aligned SSIM",
        description="Structural similarity after the best harmless change.",
        of_papers=True,
    ),
    "noise_ratio": Metric(
        function=None,
        leaks="low",
        range=(0.0, 1.0),
        threshold=Threshold(value=0.4, source="Refiner"),
        title="Noise ratio",
        description="Share of noise that Refiner's evaluation network sees in the guess; needs evaluator=FILE.",
        of_papers=True,
    ),
    "transformed_psnr": Metric(
        function=_in("images", "psnr"),
        of="transformed",
        **_DECIBELS,
        threshold=_RECOGNIZABLE_PSNR,
        title="PSNR to transformed",
        description="Peak signal-to-noise ratio to the image that the defense put in place of the original.",
    ),
    "transformed_ssim": Metric(
        function=_in("images", "ssim"),
        of="transformed",
        **_SIMILARITY,
        title="SSIM to transformed",
        description="Structural similarity to the image that the defense put in place of the original.",
        of_papers=True,
    ),
    **{
        name: Metric(
            function=None if name in _OF_BAGS else _in(_MODULES[of], name),
            of=of,
            leaks="high",
            range=(0.0, 1.0),
            threshold=Threshold(value=0.5, source="fl_privacy") if name in (TEXT_METRIC, "word_f1") else None,
            title=title,
            digits=lambda share: f"{100 * share:.0f} %",
            description=description,
            of_papers=name in _SELDOM,
        )
        for name, of, title, description in _SHARES
    },
    **{name: getattr(import_module(file), name) for name, file in registered_files("fl_privacy.measure").items()},
}
"""Metrics by name. A file ``_NAME.py`` of this folder with a ``Metric`` called ``NAME`` is registered, too; it should
import PyTorch inside its function only."""

NOT_METRICS = frozenset(
    {
        *("kind", "attacker", "id", "round", "client", "image", "failure"),
        *("label", "label_source", "certainty", "member", "attack_loss"),
        *("exact", "best_rank", "rank", "lead", "candidates", "foreign"),
        *("control_psnr", "control_ssim", "control_lead", "control_f1", "control_cells"),
        *("words_read", "words_there", "words_false", "words_of", "word_control_f1", "chance", "word_chance"),
    }
)
"""Names of other fields of an image's record, which no metric may have."""


def register_metric(name: str, metric: Metric) -> None:
    """Add ``metric`` to ``METRICS``; ``UserError`` if ``name`` is taken or no identifier."""
    if not name.isidentifier() or name in NOT_METRICS:
        raise UserError(f"A metric's name is expected to be a free identifier, but got {name!r}; try my_metric.")
    if METRICS.setdefault(name, metric) is not metric:
        raise UserError(f"A metric's name is expected to be new, but {name!r} is taken; choose another one.")
