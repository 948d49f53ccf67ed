"""Whether a policy is privacy-aware in the sense of the paper's Definition 2 (Gao et al. 2023)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.errors import UserError

_ROUNDING = 1e-9
"""Of a share of whole images."""


@dataclass(frozen=True, kw_only=True)
class PrivacyAware:
    """The triple for which policies are privacy-aware (Definition 2, Equations 3 and 4).

    Attributes:
        epsilon: dB, of what is read of an image, compared with the image that the model saw; less counts as hidden.
        delta: largest share of the images that may be read better, in [0, 1].
        gamma: accuracy in [0, 1] that has to be more than what the policy costs.

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
        """Say whether a policy is privacy-aware, by images that were attacked.

        Args:
            psnr: (N,) dB, of what was read of each image to the transformed one; infinite for an equal one.
            accuracy: in [0, 1], of the model that was trained without the policy.
            transformed: in [0, 1], of the one that was trained with it.

        Raises:
            UserError: no image was attacked, or a value is not a number.
        """
        hidden = _checked(psnr) < self.epsilon
        return int(hidden.sum()) >= len(hidden) * (1 - self.delta) - _ROUNDING and accuracy - transformed < self.gamma


def least_epsilon(psnr: Tensor | Sequence[float], *, delta: float) -> float:
    """Find the dB above which a policy hides all but the share ``delta`` of its images (Equation 3).

    It is the PSNR of the best-read image that has to be hidden; every larger ``epsilon`` holds, none that is as small.

    Args:
        psnr: (N,) dB, of what was read of each image to the transformed one; infinite for an equal one.
        delta: share of the images that may be read better, in [0, 1].

    Returns:
        -inf where none has to be hidden.

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
