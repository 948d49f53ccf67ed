"""Privacy-aware policies in the sense of Definition 2 (Gao et al. 2023)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.errors import UserError

_ROUNDING = 1e-9
"""Rounding error of a share of images."""


@dataclass(frozen=True, kw_only=True)
class PrivacyAware:
    """Triple for which policies are privacy-aware (Definition 2, Equations 3 and 4).

    Attributes:
        epsilon: PSNR in dB of a reconstruction to the transformed image; below it the image counts as hidden.
        delta: largest share of images reconstructed better, in [0, 1].
        gamma: accuracy in [0, 1], an upper bound on the policy's cost.

    Raises:
        UserError: a value is out of its range.
    """

    epsilon: float
    delta: float
    gamma: float

    def __post_init__(self) -> None:
        checks.number("epsilon", self.epsilon, example=20.0)
        checks.number("delta", self.delta, at_least=0, at_most=1, example=0.1)
        checks.number("gamma", self.gamma, at_least=0, at_most=1, example=0.01)

    def holds(self, psnr: Tensor | Sequence[float], *, accuracy: float, transformed: float) -> bool:
        """Return ``True`` if a policy is privacy-aware, by attacked images.

        Args:
            psnr: (N,) dB of each reconstruction to the transformed image; infinite for an equal one.
            accuracy: accuracy in [0, 1] of the model trained without the policy.
            transformed: accuracy in [0, 1] of the model trained with it.

        Raises:
            UserError: no image was attacked, or a value is not a number.
        """
        hidden = _checked(psnr) < self.epsilon
        return int(hidden.sum()) >= len(hidden) * (1 - self.delta) - _ROUNDING and accuracy - transformed < self.gamma


def least_epsilon(psnr: Tensor | Sequence[float], *, delta: float) -> float:
    """Find the dB above which a policy hides all but the share ``delta`` of its images (Equation 3).

    Exactly the larger ``epsilon`` hold.

    Args:
        psnr: (N,) dB of each reconstruction to the transformed image; infinite for an equal one.
        delta: share of images that may be reconstructed better, in [0, 1].

    Returns:
        PSNR in dB; -inf if no image has to be hidden.

    Raises:
        UserError: no image was attacked, a value is not a number, or ``delta`` is not a share.
    """
    checks.number("delta", delta, at_least=0, at_most=1, example=0.1)
    values = _checked(psnr).sort().values
    hidden = math.ceil(len(values) * (1 - delta) - _ROUNDING)
    return float(values[hidden - 1]) if hidden else -math.inf


def _checked(psnr: Tensor | Sequence[float]) -> Tensor:
    values = torch.as_tensor(psnr, dtype=torch.float64).flatten()
    if len(values) == 0 or bool(values.isnan().any()):
        raise UserError("psnr is expected to have a number for each attacked image, and one at least.")
    return values
