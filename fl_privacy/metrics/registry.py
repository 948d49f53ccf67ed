"""Every metric by name: what the catalog, the tables and the reports show."""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from fl_privacy.metrics.images import MetricFunction, bpki, mse, psnr, rmse, ssim
from fl_privacy.metrics.learned import lpips
from fl_privacy.metrics.matching import label_correct


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric and how to read it.

    Attributes:
        function: (guesses, truths) -> (N,), of images (N, C, H, W) in [0, 1] or of labels; ``None`` where a run has to
            give it.
        of: what it compares: images with the originals, labels, or images with what a defense made of the originals.
        leaks: whether high or low values mean that more leaked.
        range: the least and the largest value that there can be.
        title: for a table's head.
        unit: empty where there is none.
        description: one line.
        package: that it needs beyond those of the core; without it the metric is left out.
    """

    function: MetricFunction | None
    of: Literal["images", "labels", "transformed"] = "images"
    leaks: Literal["high", "low"]
    range: tuple[float, float] = (0.0, math.inf)
    title: str
    unit: str = ""
    description: str
    package: str | None = None

    @property
    def available(self) -> bool:
        """Whether the package that it needs is installed."""
        return self.package is None or find_spec(self.package) is not None


METRICS: dict[str, Metric] = {
    "psnr": Metric(
        function=psnr, leaks="high", title="PSNR", unit="dB", description="Peak signal-to-noise ratio on [0, 1]."
    ),
    "ssim": Metric(
        function=ssim,
        leaks="high",
        range=(-1.0, 1.0),
        title="SSIM",
        description="Structural similarity, Gaussian window of 11 pixels.",
        package="torchmetrics",
    ),
    "lpips": Metric(
        function=lpips,
        leaks="low",
        title="LPIPS",
        description="Perceptual distance in the features of AlexNet.",
        package="lpips",
    ),
    "mse": Metric(
        function=mse,
        leaks="low",
        range=(0.0, 1.0),
        title="MSE",
        description="Mean squared error of the pixels (BPMSE).",
    ),
    "bpki": Metric(
        function=bpki,
        leaks="high",
        title="BPKI",
        description="Bayesian privacy loss: KL of a uniform histogram to that of the guess; 10 intervals, 1 pixel added"
        " to each unless bpki says otherwise. Up to 0.3 counts as safe.",
    ),
    "rmse": Metric(
        function=rmse, leaks="low", title="rMSE", description="Error relative to the image, ||guess - x|| / ||x||."
    ),
    "noise_ratio": Metric(
        function=None,
        leaks="low",
        range=(0.0, 1.0),
        title="Noise ratio",
        description="Share of noise that Refiner's evaluation network sees in the guess; needs evaluator=FILE.",
    ),
    "transformed_psnr": Metric(
        function=psnr,
        of="transformed",
        leaks="high",
        title="PSNR to transformed",
        unit="dB",
        description="Peak signal-to-noise ratio to the image that the defense put in place of the original.",
    ),
    "transformed_ssim": Metric(
        function=ssim,
        of="transformed",
        leaks="high",
        range=(-1.0, 1.0),
        title="SSIM to transformed",
        description="Structural similarity to the image that the defense put in place of the original.",
        package="torchmetrics",
    ),
    "label_correct": Metric(
        function=label_correct,
        of="labels",
        leaks="high",
        range=(0.0, 1.0),
        title="Label accuracy",
        description="Share of the labels recovered; in a batch, each guessed label counts once.",
    ),
}
