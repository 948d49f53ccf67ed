"""How much of an image a reconstruction shows; the only place where guess and truth meet."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.metrics.images import (
        MetricFunction as MetricFunction,
    )
    from fl_privacy.metrics.images import (
        bayesian_privacy_loss as bayesian_privacy_loss,
    )
    from fl_privacy.metrics.intervals import (
        FEW as FEW,
    )
    from fl_privacy.metrics.intervals import (
        Statistic as Statistic,
    )
    from fl_privacy.metrics.intervals import (
        aggregate as aggregate,
    )
    from fl_privacy.metrics.intervals import (
        pmm as pmm,
    )
    from fl_privacy.metrics.intervals import (
        share_at_most as share_at_most,
    )
    from fl_privacy.metrics.lpips import noise_ratio as noise_ratio
    from fl_privacy.metrics.registry import (
        LARGEST_PSNR as LARGEST_PSNR,
    )
    from fl_privacy.metrics.registry import (
        METRICS as METRICS,
    )
    from fl_privacy.metrics.registry import (
        NOT_METRICS as NOT_METRICS,
    )
    from fl_privacy.metrics.registry import (
        Metric as Metric,
    )
    from fl_privacy.metrics.registry import (
        Threshold as Threshold,
    )
    from fl_privacy.metrics.registry import (
        decimals as decimals,
    )
    from fl_privacy.metrics.registry import (
        register_metric as register_metric,
    )
    from fl_privacy.metrics.scores import (
        ImageScore as ImageScore,
    )
    from fl_privacy.metrics.scores import (
        VictimScore as VictimScore,
    )
    from fl_privacy.metrics.scores import (
        evaluate as evaluate,
    )
    from fl_privacy.metrics.scores import (
        evaluate_all as evaluate_all,
    )
    from fl_privacy.metrics.scores import (
        unjudged as unjudged,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
