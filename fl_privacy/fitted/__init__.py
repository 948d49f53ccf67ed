"""What parameters of models that are fitted to the end, not stepped, give away: optima, means and variances."""

from fl_privacy.fitted._gaussian_nb import Moments as Moments
from fl_privacy.fitted._gaussian_nb import RowsBetween as RowsBetween
from fl_privacy.fitted._gaussian_nb import rows_alone as rows_alone
from fl_privacy.fitted._gaussian_nb import rows_between as rows_between
from fl_privacy.fitted._logistic_regression import LogisticOptimum as LogisticOptimum
from fl_privacy.fitted._logistic_regression import row_beside_known as row_beside_known
from fl_privacy.fitted._logistic_regression import weighted_sums as weighted_sums
