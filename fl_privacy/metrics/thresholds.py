"""From which value on the literature calls a reconstruction recognizable."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A bound on one metric.

    Attributes:
        metric: name in ``METRICS``, or of a metric that an attack records besides.
        value: the bound.
        leaks: on which side of the bound the image is recognizable.
        source: who says so.
    """

    metric: str
    value: float
    leaks: Literal["above", "below"]
    source: str

    def is_leak(self, value: float) -> bool:
        """Whether an image with this value counts as recognizable; the bound itself does if it is an upper one."""
        return value >= self.value if self.leaks == "above" else value < self.value


THRESHOLDS = (
    Threshold(metric="psnr", value=15.0, leaks="above", source="Refiner"),
    Threshold(metric="ssim", value=0.5, leaks="above", source="Refiner"),
    Threshold(metric="lpips", value=0.05, leaks="below", source="Refiner"),
    Threshold(metric="noise_ratio", value=0.4, leaks="below", source="Refiner"),
    Threshold(metric="mse", value=0.05, leaks="below", source="FDL-PP"),
)
