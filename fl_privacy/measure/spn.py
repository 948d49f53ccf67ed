"""Tracing distances of SPN: whose images these are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """Result of a tracing attack.

    Attributes:
        distance: share of queries traced to a wrong participant, in [0, 1]; 1 - 1 / ``participants`` by guessing.
        attacked_distance: share for attacked queries alone, which have a reconstruction of their own.
        participants: number of possible owners.
    """

    distance: float
    attacked_distance: float
    participants: int
    queries: int


CHUNK = 1024
"""Queries compared at a time."""


def trace(guesses: Tensor, owners: Tensor, queries: Tensor) -> Tensor:
    """Trace each query to the owner of the nearest guess, (Q,) (SPN, Fan et al. 2020, Algorithm 6).

    Args:
        guesses: (R, C, H, W) reconstructed images, at least one.
        owners: (R,) owner of each guess's update.
        queries: (Q, C, H, W) images to trace.

    Raises:
        UserError: there are no guesses, or shapes do not match.
    """
    if not len(guesses) or len(guesses) != len(owners) or guesses.shape[1:] != queries.shape[1:]:
        raise UserError(
            "Tracing expects images of one shape and an owner for each reconstruction, but got"
            f" {tuple(guesses.shape)} with {len(owners)} owners and {tuple(queries.shape)}."
        )
    return owners[nearest(guesses, queries)[1]]


def nearest(images: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Euclidean distance and index, (Q,) each, of the nearest of ``images`` (R, C, H, W) to each query.

    Distances are exact, and do not depend on the number compared at a time.
    """
    flat = images.flatten(1).float()
    # no matrix products, whose rounding depends on the chunk
    exact = "donot_use_mm_for_euclid_dist"
    chunks = [some.flatten(1).float() for some in torch.split(queries, CHUNK)]
    found = [torch.cdist(some, flat, compute_mode=exact).min(1) for some in chunks]
    if not found:
        return queries.new_zeros(0), torch.zeros(0, dtype=torch.long)
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


def tracing_distance(guesses: Tensor, owners: Tensor, queries: Tensor, query_owners: Tensor) -> float:
    """Compute the share, in [0, 1], of queries traced to a wrong owner.

    Args:
        guesses, owners, queries: see :func:`trace`.
        query_owners: (Q,) true owners, at least one.
    """
    return float((trace(guesses, owners, queries) != query_owners).double().mean())
