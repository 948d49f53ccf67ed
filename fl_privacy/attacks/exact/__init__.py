"""Inputs that the gradient of a fully connected layer holds, by solving for them."""

from fl_privacy.attacks.exact.analytic import AnalyticInversion, analytic
from fl_privacy.attacks.exact.attack import ExactInversion, exact

__all__ = ["AnalyticInversion", "ExactInversion", "analytic", "exact"]
