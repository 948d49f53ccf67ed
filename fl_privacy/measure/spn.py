"""Distances as SPN publishes them: whose images these are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """Result of a tracing attack.

    Attributes:
        distance: share of the queries that were traced to a wrong participant, in [0, 1]; 1 - 1 / ``participants`` is
            what guessing gets.
        attacked_distance: the same of those queries that were attacked; others have no reconstruction of their own.
        participants: among how many.
        queries: how many images were asked for.
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
        owners: (R,) whose update each was reconstructed from.
        queries: (Q, C, H, W) images whose owner is asked for, any number.

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
    """Return for each query the Euclidean distance of the nearest of ``images`` (R, C, H, W), and its index, (Q,) each.

    Distances are exact: those of equal images are equal, and 0 to the image itself, whatever is compared at a time.
    """
    flat = images.flatten(1).float()
    # without matrix products, whose rounding depends on the chunk
    exact = "donot_use_mm_for_euclid_dist"
    chunks = [some.flatten(1).float() for some in torch.split(queries, CHUNK)]
    found = [torch.cdist(some, flat, compute_mode=exact).min(1) for some in chunks]
    if not found:
        return queries.new_zeros(0), torch.zeros(0, dtype=torch.long)
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


def tracing_distance(guesses: Tensor, owners: Tensor, queries: Tensor, query_owners: Tensor) -> float:
    """Share of the queries that are traced to somebody else than their owner, in [0, 1].

    Args:
        guesses, owners, queries: as in :func:`trace`.
        query_owners: (Q,) the truth, at least one.
    """
    return float((trace(guesses, owners, queries) != query_owners).double().mean())
