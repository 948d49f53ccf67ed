"""Measures of leakage; only this package compares guesses with the originals."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.measure.images import (
        MetricFunction as MetricFunction,
        bayesian_privacy_loss as bayesian_privacy_loss,
    )
    from fl_privacy.measure.intervals import (
        FEW as FEW,
        Statistic as Statistic,
        aggregate as aggregate,
        pmm as pmm,
        share_at_most as share_at_most,
    )
    from fl_privacy.measure.lpips import noise_ratio as noise_ratio
    from fl_privacy.measure.outcome import ImageScore as ImageScore
    from fl_privacy.measure.registry import (
        LARGEST_PSNR as LARGEST_PSNR,
        METRICS as METRICS,
        NOT_METRICS as NOT_METRICS,
        Metric as Metric,
        Threshold as Threshold,
        decimals as decimals,
        register_metric as register_metric,
    )
    from fl_privacy.measure.scores import (
        VictimScore as VictimScore,
        evaluate as evaluate,
        evaluate_all as evaluate_all,
        unjudged as unjudged,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
