"""Matching of guesses to originals."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.types import Batch, Reconstruction

_SAME = 0.5 / 255  # root mean squared error below which guess and original are equal, and always matched


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """Originals of a batch and the guesses matched to them, in the originals' order, on the CPU."""

    originals: Tensor  # (B, C, H, W)
    labels: Tensor  # (B,) class indices
    guesses: Tensor  # (B, C, H, W) clamped to [0, 1]; zeros without a guess
    guessed_labels: Tensor  # (B,) class indices in the best order; -1 without a guess
    order: Tensor  # (B,) index of the guess in the reconstruction; -1 without one
    failure: str | None

    @property
    def found(self) -> Tensor:
        return (self.order >= 0).nonzero().flatten()


def no_guess(reconstruction: Reconstruction) -> str | None:
    """Return why there is no guess, or ``None`` if there is one."""
    if reconstruction.failure is not None:
        return reconstruction.failure
    return "The attack made no guess." if reconstruction.batch is None else None


def match(reconstruction: Reconstruction, truth: Batch) -> Match:
    """Match the guesses of ``reconstruction``, clamped to [0, 1], to the images of ``truth``."""
    originals, labels = truth.inputs.detach().cpu(), hard_labels(truth.labels.detach().cpu())
    failure, guess, expected = no_guess(reconstruction), None, tuple(originals.shape[1:])
    if reconstruction.batch is not None and (got := tuple(reconstruction.batch.inputs.shape[1:])) != expected:
        failure = failure or f"The guess is expected to have the shape {expected}, but has {got}."
    if failure is None and reconstruction.batch is not None:
        inputs = reconstruction.batch.inputs.detach().cpu().to(originals.dtype)
        inputs = inputs.where(~inputs.isfinite(), inputs.clamp(0, 1))
        guess = inputs, assign(inputs, originals), reconstruction.batch.labels
    return matched(originals, labels, guess, failure, missing="There is no guess with finite pixels for this image.")


Guess = tuple[Tensor, Tensor, Tensor | None]  # inputs, index (B,) of each original's guess, and labels, if any


def matched(
    originals: Tensor, labels: Tensor, guess: Guess | None, failure: str | None, *, missing: str, empty: float = 0.0
) -> Match:
    """Build a :class:`Match`; ``guess`` is ``None`` if the attack failed, and ``failure`` is the reason.

    An original without a guess gets one filled with the value ``empty``. If only some lack one, the failure is
    ``missing``.
    """
    order, guesses = torch.full((len(originals),), -1), torch.full_like(originals, empty)
    guessed_labels = torch.full_like(labels, -1)
    if guess is not None:
        inputs, order, known = guess
        found = order >= 0
        guesses[found] = inputs[order[found]]
        if known is not None:
            in_order = hard_labels(known.detach().cpu())[order[found]].to(labels.dtype)
            guessed_labels[found] = pair_labels(in_order, labels[found])
        failure = None if bool(found.all()) else missing
    return Match(
        originals=originals, labels=labels, guesses=guesses, guessed_labels=guessed_labels, order=order, failure=failure
    )


def order_of(shape: tuple[int, int], cost: Callable[[], Tensor], of: str = "a batch") -> Tensor:
    """Return the index (B,) of each original's guess in the cheapest assignment; -1 if none is left.

    ``cost()``: costs (B, G) of pairing B originals and G guesses, of this ``shape``. ``of``: what is matched, for error
    messages.
    """
    if shape == (1, 1):
        return torch.zeros(1, dtype=torch.long)
    order = torch.full((shape[0],), -1)
    if shape[1]:
        rows, columns = least_cost(cost().cpu().numpy(), of)
        order[torch.as_tensor(rows)] = torch.as_tensor(columns)
    return order


def least_cost(cost: np.ndarray, of: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the assignment of least total ``cost`` (N, M); errors name what is matched, ``of``."""
    try:
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415
    except ImportError as error:
        raise UserError(f"Matching {of} is expected to find scipy, but it is missing; `pip install scipy`.") from error
    rows, columns = linear_sum_assignment(cost)
    return rows, columns


def assign(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return the index (B,) of each original's guess in the assignment of least squared error; -1 if none is left.

    Guesses (G, C, H, W) that are not finite are left out; pairs equal up to rounding to 8 bits are matched first.
    """
    candidates = torch.isfinite(guesses).flatten(1).all(1).nonzero().flatten()

    def cost() -> Tensor:
        flat = truths.flatten(1).double(), guesses[candidates].flatten(1).double()
        distance = torch.cdist(*flat, compute_mode="donot_use_mm_for_euclid_dist")
        squared = distance.square()
        squared[distance < _SAME * truths[0].numel() ** 0.5] -= len(truths) * squared.max()
        return squared

    order = order_of((len(truths), len(candidates)), cost)
    order[order >= 0] = candidates.cpu()[order[order >= 0]]
    return order


def hard_labels(labels: Tensor) -> Tensor:
    """Return the class indices (N,) of labels, which are class indices (N,) or class probabilities (N, K)."""
    return labels.argmax(1) if labels.ndim == 2 else labels


def pair_labels(guesses: Tensor, truths: Tensor) -> Tensor:
    """Reorder the guessed classes ``guesses`` (B,) so that as many as possible equal ``truths`` (B,)."""
    order = (guesses != truths).long().argsort(stable=True)
    guesses, truths = guesses[order], truths[order]
    same = numbered(truths)[:, None] == numbered(guesses)
    paired = truths.clone()
    paired[~same.any(1)] = guesses[~same.any(0)]
    return paired[order.argsort()]


def numbered(tokens: Tensor) -> Tensor:
    """Return integers (..., L) for tokens (..., L): the k-th occurrence of a token has the same one in every text."""
    return tokens * tokens.shape[-1] + (tokens[..., None] == tokens[..., None, :]).tril(-1).sum(-1)


def label_correct(guesses: Tensor, truths: Tensor) -> Tensor:
    """Return (N,), float64: 1 if a guessed class is right, else 0; labels are classes (N,) or probabilities (N, K)."""
    return (hard_labels(guesses) == hard_labels(truths)).double()
