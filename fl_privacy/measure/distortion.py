"""Measures of a defense's change to an update, and tracing of images to clients (SPN)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.types import Tensors


@dataclass(frozen=True, kw_only=True)
class UpdateDistortion:
    """Distance of a defended update from the undefended one: ratio of norms, cosine, and share of zeros."""

    # ||B|| / ||E||, norm of the undefended update over that of the difference; infinite if nothing changed
    signal_to_distortion: float
    cosine: float  # cosine of the angle between both updates, in [-1, 1]; NaN if one is zero
    zeros: float  # share of elements that are zero or withheld in the defended update


def distortion_of(clean: Tensors, defended: Tensors) -> UpdateDistortion:
    """Return how far the update ``defended`` is from the update ``clean``, in several measures.

    A tensor that is missing in ``defended`` counts as zeros; an additional one raises ``UserError``.
    """
    for name, t in defended.items():
        if name not in clean or clean[name].shape != t.shape:
            expected = f"shape {tuple(clean[name].shape)}" if name in clean else f"a name among {sorted(clean)}"
            raise UserError(f"{name} is expected to have {expected}, but has {tuple(t.shape)}; compare one model.")
    b = _flat(clean)
    d = _flat({name: defended.get(name, torch.zeros_like(t)) for name, t in clean.items()})
    signal, error, size = (float(torch.linalg.vector_norm(v)) for v in (b, d - b, d))
    return UpdateDistortion(
        signal_to_distortion=signal / error if error > 0 else math.inf,
        cosine=float(b @ d) / (signal * size) if signal > 0 and size > 0 else math.nan,
        zeros=float((d == 0).double().mean()),
    )


def _flat(tensors: Tensors) -> Tensor:
    return torch.cat([t.detach().flatten().double() for t in tensors.values()])


@dataclass(frozen=True, kw_only=True)
class LinearSystem:
    """How exactly a layer's gradients determine its input x under a defense's noise (SPN, Theorem 2.2).

    The equations are B x = W: B is the diagonal matrix of the bias gradient's entries b_i, with the noise E_B of
    entries e_i; W is the gradient of the weight. Norms are spectral, and Euclidean for W.
    """

    condition: float  # condition number kappa(B), largest over smallest |b_i|
    contraction: float  # norm ||B^-1 E_B||, the largest |e_i / b_i|
    error_bound: float  # bound on ||x* - x|| / ||x||; infinite if the theorem's condition fails

    @property
    def solvable(self) -> bool:
        return self.contraction < 1


def linear_system(
    clean: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor], *, rows: int | None = None
) -> LinearSystem:
    """Return how well a layer's gradients determine its input, from the undefended and the uploaded gradients.

    ``clean``, ``seen``: undefended and uploaded gradients of weight (outputs, inputs) and bias (outputs,). ``rows``:
    number of rows to use, those of largest uploaded bias gradient; ``None`` takes all of nonzero bias gradient.
    """
    weight, bias, seen_weight, seen_bias = (t.detach().double() for t in (*clean, *seen))
    chosen = bias.nonzero().flatten() if rows is None else seen_bias.abs().topk(min(rows, len(bias))).indices
    w, b = weight[chosen], bias[chosen].abs()
    if not len(chosen) or not b.all():
        return LinearSystem(condition=math.inf, contraction=math.inf, error_bound=math.inf)
    e_w, e_b = (seen_weight - weight)[chosen], (seen_bias - bias)[chosen].abs()
    condition, contraction = float(b.max() / b.min()), float((e_b / b).max())
    relative = float(e_b.max() / b.max()) + float(e_w.norm() / w.norm())
    bound = condition / (1 - contraction) * relative if contraction < 1 else math.inf
    return LinearSystem(condition=condition, contraction=contraction, error_bound=bound)


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """Result of an attack that assigns images to their clients: the share of wrong ones (SPN, Fan et al. 2020)."""

    distance: float  # share in [0, 1] of queries traced to a wrong client; 1 - 1 / ``participants`` by guessing
    attacked_distance: float  # the same share for attacked queries only
    participants: int  # number of clients
    queries: int  # number of traced images


CHUNK = 1024  # queries compared at a time


def trace(guesses: Tensor, owners: Tensor, queries: Tensor) -> Tensor:
    """Return the owner (Q,) of the guess nearest to each query (Q, C, H, W) (SPN, Fan et al. 2020, Algorithm 6).

    ``owners``: client whose image each guess reconstructs.
    """
    if not len(guesses) or len(guesses) != len(owners) or guesses.shape[1:] != queries.shape[1:]:
        raise UserError(
            "trace is expected to get images of one shape, and an owner of each of at least one guess, but got"
            f" {len(owners)} owners of guesses {tuple(guesses.shape)} and queries {tuple(queries.shape)}; give these."
        )
    return owners[nearest(guesses, queries)[1]]


def nearest(images: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return distance (Q,) and index (Q,) of the nearest of R ``images`` (R, C, H, W) to each of Q ``queries``."""
    flat = images.flatten(1).float()
    # no matrix products, whose rounding depends on the chunk
    exact = "donot_use_mm_for_euclid_dist"
    chunks = [some.flatten(1).float() for some in torch.split(queries, CHUNK)]
    found = [torch.cdist(some, flat, compute_mode=exact).min(1) for some in chunks]
    if not found:
        return queries.new_zeros(0), torch.zeros(0, dtype=torch.long)
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


def tracing_distance(guesses: Tensor, owners: Tensor, queries: Tensor, query_owners: Tensor) -> float:
    """Return the share in [0, 1] of query images that nearest-guess matching (:func:`trace`) assigns to a wrong client.

    ``owners`` (G,): client whose image each guess reconstructs. ``query_owners`` (Q,): client that owns each query.
    """
    return float((trace(guesses, owners, queries) != query_owners).double().mean())
