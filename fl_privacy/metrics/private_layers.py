"""What FDL-PP watches in its clients' private layers over training (Gu et al. 2021, section 5.3)."""

import torch
from torch import Tensor


def mean_squared_distance(weights: Tensor) -> float:
    """Mean over all pairs of clients, a client with itself included, of ``||W_i - W_j||^2`` (Figure 4).

    Args:
        weights: (N, ...) of N clients.
    """
    flat = weights.flatten(1).double()
    return float(torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square().mean())


def effective_rank(weight: Tensor, *, share: float = 0.99) -> int:
    """How many of the largest singular values add up to ``share`` of the sum of all (Figure 5, left).

    The paper takes "99 % of the sum of the singular values as threshold" and counts the values above; a single value is
    never above that, so it is read as the sum that the values counted have to reach.

    Args:
        weight: (O, ...), seen as a matrix of O rows.
        share: above 0 up to 1.
    """
    values = torch.linalg.svdvals(weight.flatten(1).double())
    reached = values.cumsum(0) >= share * values.sum() * (1 - 1e-12)
    return int(reached.long().argmax()) + 1
