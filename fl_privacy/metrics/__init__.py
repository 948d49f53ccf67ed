"""How much of an image a reconstruction shows; the only place where guess and truth meet."""

from fl_privacy.metrics.images import MetricFunction, bayesian_privacy_loss
from fl_privacy.metrics.intervals import FEW, Statistic, aggregate, pmm, share_at_most
from fl_privacy.metrics.learned import noise_ratio
from fl_privacy.metrics.registry import (
    LARGEST_PSNR,
    METRICS,
    NOT_METRICS,
    Metric,
    Threshold,
    decimals,
    register_metric,
)
from fl_privacy.metrics.scores import ImageScore, VictimScore, evaluate, evaluate_all

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
]
