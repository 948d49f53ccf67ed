"""How much of an image a reconstruction shows; the only place where guess and truth meet."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.metrics.images import MetricFunction, bayesian_privacy_loss
    from fl_privacy.metrics.intervals import FEW, Statistic, aggregate, pmm, share_at_most
    from fl_privacy.metrics.lpips import noise_ratio
    from fl_privacy.metrics.registry import (
        LARGEST_PSNR,
        METRICS,
        NOT_METRICS,
        Metric,
        Threshold,
        decimals,
        register_metric,
    )
    from fl_privacy.metrics.scores import ImageScore, VictimScore, evaluate, evaluate_all, unjudged

_HOMES = {
    "fl_privacy.metrics.images": ("MetricFunction", "bayesian_privacy_loss"),
    "fl_privacy.metrics.intervals": ("FEW", "Statistic", "aggregate", "pmm", "share_at_most"),
    "fl_privacy.metrics.lpips": ("noise_ratio",),
    "fl_privacy.metrics.registry": (
        "LARGEST_PSNR",
        "METRICS",
        "NOT_METRICS",
        "Metric",
        "Threshold",
        "decimals",
        "register_metric",
    ),
    "fl_privacy.metrics.scores": ("ImageScore", "VictimScore", "evaluate", "evaluate_all", "unjudged"),
}

__all__ = [
    "FEW",
    "LARGEST_PSNR",
    "METRICS",
    "NOT_METRICS",
    "ImageScore",
    "Metric",
    "MetricFunction",
    "Statistic",
    "Threshold",
    "VictimScore",
    "aggregate",
    "bayesian_privacy_loss",
    "decimals",
    "evaluate",
    "evaluate_all",
    "noise_ratio",
    "pmm",
    "register_metric",
    "share_at_most",
    "unjudged",
]

__getattr__ = on_demand(__name__, _HOMES)
