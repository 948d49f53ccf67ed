"""Tests whether an app leaks more than before: measurement, baseline, and comparison."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.auditing.regression.measurement import (
        Comparison as Comparison,
        Measurement as Measurement,
        compare as compare,
        measure_run as measure_run,
        measure_training as measure_training,
        read_baseline as read_baseline,
        write_baseline as write_baseline,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
