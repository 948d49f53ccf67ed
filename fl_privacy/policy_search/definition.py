"""Whether a policy is privacy-aware in the sense of the paper's Definition 2 (Gao et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.errors import UserError


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
        checks.finite(self.epsilon, "epsilon")
        checks.share(self.delta, "delta")
        checks.share(self.gamma, "gamma")

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
        return float(hidden.double().mean()) >= 1 - self.delta and accuracy - transformed < self.gamma


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
    checks.share(delta, "delta")
    values = _checked(psnr).sort().values
    ranks = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    needed = int((ranks < 1 - delta).sum())  # images before the one with which the share is reached
    return float("-inf") if delta >= 1 else float(values[needed])


def _checked(psnr: Tensor | Sequence[float]) -> Tensor:
    values = torch.as_tensor(psnr, dtype=torch.float64).flatten()
    if len(values) == 0 or bool(values.isnan().any()):
        raise UserError("psnr is expected to have a number for each attacked image, and one at least.")
    return values
