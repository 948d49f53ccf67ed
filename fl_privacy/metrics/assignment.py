"""Which guess belongs to which truth: an update does not tell the order of its batch."""

import torch
from torch import Tensor

from fl_privacy.errors import UserError


def assign(guesses: Tensor, truths: Tensor) -> Tensor:
    """The assignment of guesses to truths with the least total squared error.

    Args:
        guesses: (G, C, H, W); those with a pixel that is not finite are left out.
        truths: (B, C, H, W).

    Returns:
        (B,) for each truth the index of its guess, -1 where there are too few finite guesses.

    Raises:
        UserError: scipy is not installed.
    """
    order = torch.full((len(truths),), -1)
    candidates = torch.isfinite(guesses).flatten(1).all(1).nonzero().flatten()
    if len(candidates) == 1 == len(truths):
        return candidates
    if not len(candidates):
        return order
    try:
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415
    except ImportError as error:
        raise UserError("Matching a batch needs scipy, which is not installed; run `pip install scipy`.") from error
    distance = torch.cdist(
        truths.flatten(1).double(),
        guesses[candidates].flatten(1).double(),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    rows, columns = linear_sum_assignment(distance.square().cpu().numpy())
    order[torch.as_tensor(rows)] = candidates.cpu()[torch.as_tensor(columns)]
    return order
