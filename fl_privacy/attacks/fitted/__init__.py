"""Infer training rows from fully fitted models: from optima, means and variances."""

from fl_privacy.attacks.fitted._gaussian_nb import (
    Moments as Moments,
    RowsBetween as RowsBetween,
    rows_alone as rows_alone,
    rows_between as rows_between,
)
from fl_privacy.attacks.fitted._logistic_regression import (
    LogisticOptimum as LogisticOptimum,
    last_row as last_row,
    weighted_sums as weighted_sums,
)
