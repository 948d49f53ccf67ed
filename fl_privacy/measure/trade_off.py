"""Privacy-preserving characteristics of a mechanism: SPN's PPC curves and CAP."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_privacy.errors import UserError

GREEN_BELOW, RED_ABOVE = 1.0, 40.0
"""Ratios ||B|| / ||E|| between the regions of a curve. Green: the perturbation exceeds the gradient, reconstruction
is expected to fail (Theorem 2.2). Red, roughly from where Figure 5 puts it: so small that images are restored."""


@dataclass(frozen=True, kw_only=True)
class PpcPoint:
    """A mechanism at one control value.

    Attributes:
        accuracy: accuracy of the trained model, in [0, 1].
        distance: distance of an attack's results from the truth, at least 0.
        signal_to_distortion: ||B|| / ||E||, norm of the gradient over that of the perturbation.
    """

    accuracy: float
    distance: float
    signal_to_distortion: float

    @property
    def calibrated(self) -> float:
        """Return Acc * dist (SPN, Definition 1)."""
        return self.accuracy * self.distance

    @property
    def abscissa(self) -> float:
        """Return log10(||B|| / ||E|| + 1), the horizontal axis of a PPC curve; infinite for an infinite ratio."""
        return math.log10(self.signal_to_distortion + 1)


def cap(points: Sequence[PpcPoint]) -> float:
    """Compute the calibrated averaged performance, the mean of Acc * dist (SPN, Eq. 1); higher is better.

    Raises:
        UserError: there are no points.
    """
    if not points:
        raise UserError("CAP is expected to be of at least one point of a mechanism, but there are none.")
    return sum(point.calibrated for point in points) / len(points)
