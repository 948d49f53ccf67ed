"""Bins of image brightness, so narrow that most of them catch one image of a batch or none."""

from statistics import NormalDist

import torch
from torch import Tensor

from fl_privacy.errors import UserError


def brightness_edges(number: int, mean: float | None, std: float | None, public: Tensor) -> Tensor:
    """(number,) ascending float64: between two of them falls an image as often as between any other two.

    Quantiles at i / (number + 1) of the mean pixel (Robbing the Fed, Fowl et al. 2022, section 4).

    Args:
        number: of edges, at least 1.
        mean, std: of the normal distribution that brightness is taken to have; ``None`` takes quantiles of ``public``.
        public: (N, C, H, W) in [0, 1], images that the server holds.

    Raises:
        UserError: there are too few public images, or they are all alike.
    """
    shares = torch.arange(1, number + 1, dtype=torch.float64) / (number + 1)
    if mean is not None and std is not None:
        normal = NormalDist(mean, std)
        return torch.tensor([normal.inv_cdf(share) for share in shares.tolist()], dtype=torch.float64)
    edges = public.double().flatten(1).mean(1).quantile(shares) if len(public) > number else shares[:0]
    if len(edges) != number or not (edges.diff() > 0).all():
        raise UserError(
            f"More than {number} public images of different brightness are expected for the bins, but there are"
            f" {len(public)}; set server.mean and server.std, or lower server.bins."
        )
    return edges
