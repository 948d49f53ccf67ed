"""Infer rows from a regression at its optimum, where the gradient of scikit-learn's objective is zero.

There sum_i (y_i - p_i) x_i^T = W / C, and sum_i (y_i - p_i) = 0 for the unpenalized intercept; p_i is the prediction.
"""

from dataclasses import dataclass

import numpy as np

from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class LogisticOptimum:
    """Fitted linear or logistic regression for F features and K classes; K = 1 for two classes or for numbers."""

    weights: np.ndarray  # (K, F), ``coef_``
    intercepts: np.ndarray  # (K,), ``intercept_``
    inverse_penalty: float = 1.0  # ``C``, or 1 / ``alpha`` of ``Ridge``; infinite without a penalty
    linear: bool = False  # ``True`` for a regression of numbers, whose labels are floats

    def __post_init__(self) -> None:
        if self.weights.ndim != 2 or self.intercepts.shape != self.weights.shape[:1] or self.inverse_penalty <= 0:
            raise UserError(
                "Weights (K, F), intercepts (K,) and C above 0 are expected, but got"
                f" {self.weights.shape}, {self.intercepts.shape} and {self.inverse_penalty}; pass those of one model."
            )
        if not (np.isfinite(self.weights).all() and np.isfinite(self.intercepts).all()):
            raise UserError("Finite weights and intercepts are expected, but some are not; fit the model again.")

    def residuals(self, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
        logits = rows @ self.weights.T + self.intercepts
        if self.linear:
            return np.asarray(labels[:, None] - logits)
        if len(self.weights) == 1:
            return np.asarray(labels[:, None] - 1 / (1 + np.exp(-logits)))
        logits = np.exp(logits - logits.max(1, keepdims=True))
        return np.asarray(np.eye(len(self.weights))[labels] - logits / logits.sum(1, keepdims=True))


def weighted_sums(optimum: LogisticOptimum) -> np.ndarray:
    """Return each class's sum (K, F) of the client's rows, weighted by label minus probability (weights / C)."""
    return np.asarray(optimum.weights / optimum.inverse_penalty)


def last_row(optimum: LogisticOptimum, rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the only one of the client's N rows that is not among the known ``rows`` (N - 1, F), and its label.

    The solution has a closed form (Balle, Cherubin and Hayes 2022, section 3). If there is no such row, or rounding
    hides it, raise ``UserError``.
    """
    left = optimum.residuals(rows, labels)
    sums = weighted_sums(optimum) - left.T @ rows  # (K, F), (y - p) of the row times the row
    share = -left.sum(0)  # (K,), (y - p) of the row
    best = int(np.argmax(np.abs(share)))
    if abs(share[best]) < 1e-9:
        raise UserError("One unknown row is expected, but the known ones explain the optimum; leave one out.")
    row = np.asarray(share @ sums / (share @ share))
    if optimum.linear:
        return row, float((share + optimum.weights @ row + optimum.intercepts)[0])
    return row, (int(share[0] > 0) if len(share) == 1 else int(np.argmax(share)))
