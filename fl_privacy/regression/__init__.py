"""Whether an app leaks more than it did: what a build measures, the baseline it keeps, and the test between the two."""

from typing import TYPE_CHECKING

from fl_privacy.lazy import on_demand

if TYPE_CHECKING:
    from fl_privacy.regression.baseline import read_baseline, write_baseline
    from fl_privacy.regression.comparison import Comparison, compare
    from fl_privacy.regression.measurement import Measurement, measure_run
    from fl_privacy.regression.training import measure_training

_HOMES = {
    "fl_privacy.regression.baseline": ("read_baseline", "write_baseline"),
    "fl_privacy.regression.comparison": ("Comparison", "compare"),
    "fl_privacy.regression.measurement": ("Measurement", "measure_run"),
    "fl_privacy.regression.training": ("measure_training",),
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
