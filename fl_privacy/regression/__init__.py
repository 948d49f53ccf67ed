"""Whether an app leaks more than it did: what a build measures, the baseline it keeps, and the test between the two."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.regression.comparison import Comparison, compare, read_baseline, write_baseline
    from fl_privacy.regression.measurement import Measurement, measure_run, measure_training

_HOMES = {
    "fl_privacy.regression.comparison": (
        "compare",
        "Comparison",
        "read_baseline",
        "write_baseline",
    ),
    "fl_privacy.regression.measurement": (
        "measure_run",
        "measure_training",
        "Measurement",
    ),
}

__all__ = [
    "Comparison",
    "Measurement",
    "compare",
    "measure_run",
    "measure_training",
    "read_baseline",
    "write_baseline",
]

__getattr__ = on_demand(__name__, _HOMES)
