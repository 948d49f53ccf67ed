"""Whose images these are: the tracing attack of SPN."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """What a tracing attack came to.

    Attributes:
        distance: share of the queries that were traced to a wrong participant, in [0, 1].
        participants: among how many.
        queries: how many images were asked for.
    """

    distance: float
    participants: int
    queries: int


CHUNK = 1024
"""Queries compared at a time."""


def trace(guesses: Tensor, owners: Tensor, queries: Tensor) -> Tensor:
    """(Q,) for each query the owner of the guess with the least mean squared error (SPN, Fan et al. 2020, Algorithm 6).

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
    flat = guesses.flatten(1).float()
    # without matrix products, whose rounding depends on the chunk, so that equal guesses are equally far
    exact = "donot_use_mm_for_euclid_dist"
    chunks = [some.flatten(1).float() for some in torch.split(queries, CHUNK)]
    nearest = [torch.cdist(some, flat, compute_mode=exact).argmin(1) for some in chunks]
    return owners[torch.cat(nearest)] if nearest else owners[:0]


def tracing_distance(guesses: Tensor, owners: Tensor, queries: Tensor, query_owners: Tensor) -> float:
    """Share of the queries that are traced to somebody else than their owner, in [0, 1].

    Args:
        guesses, owners, queries: as in :func:`trace`.
        query_owners: (Q,) the truth, at least one.
    """
    return float((trace(guesses, owners, queries) != query_owners).double().mean())
