"""Tests whether an app leaks more than before: measurement, baseline, and comparison."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.auditing.regression.comparison import (
        Comparison as Comparison,
        compare as compare,
        read_baseline as read_baseline,
        write_baseline as write_baseline,
    )
    from fl_privacy.auditing.regression.measurement import (
        Measurement as Measurement,
        measure_run as measure_run,
        measure_training as measure_training,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
