"""Match a reconstruction to its originals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.types import Batch, Reconstruction

_SAME = 0.5 / 255
"""Root mean square error below which a guess equals an original, which other errors can't outweigh."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """Guesses in the originals' order, on the CPU.

    Attributes:
        originals: (B, C, H, W).
        labels: (B,) class indices.
        guesses: (B, C, H, W) clamped to [0, 1]; zeros without a guess.
        guessed_labels: (B,) class indices in the best order; -1 without a guess.
        order: (B,) index of the guess in the reconstruction; -1 without one.
    """

    originals: Tensor
    labels: Tensor
    guesses: Tensor
    guessed_labels: Tensor
    order: Tensor
    failure: str | None

    @property
    def found(self) -> Tensor:
        """Return the indices (F,) of originals with a guess."""
        return (self.order >= 0).nonzero().flatten()


def no_guess(reconstruction: Reconstruction) -> str | None:
    """Say why there is no guess; ``None`` if there is one."""
    if reconstruction.failure is not None:
        return reconstruction.failure
    return "The attack made no guess." if reconstruction.batch is None else None


def match(reconstruction: Reconstruction, truth: Batch) -> Match:
    """Assign the guesses of ``reconstruction``, clamped to [0, 1], to the images of ``truth``."""
    originals, labels = truth.inputs.detach().cpu(), hard_labels(truth.labels.detach().cpu())
    order = torch.full((len(originals),), -1)
    guesses, guessed_labels = torch.zeros_like(originals), torch.full_like(labels, -1)
    failure, expected = no_guess(reconstruction), tuple(originals.shape[1:])
    if reconstruction.batch is not None and (got := tuple(reconstruction.batch.inputs.shape[1:])) != expected:
        failure = failure or f"The guess is expected to have the shape {expected}, but has {got}."
    if failure is None and reconstruction.batch is not None:
        batch = reconstruction.batch
        inputs = batch.inputs.detach().cpu().to(originals.dtype)
        inputs = inputs.where(~inputs.isfinite(), inputs.clamp(0, 1))
        order = assign(inputs, originals)
        found = order >= 0
        guesses[found] = inputs[order[found]]
        in_order = hard_labels(batch.labels.detach().cpu())[order[found]].to(labels.dtype)
        guessed_labels[found] = pair_labels(in_order, labels[found])
        if not bool(found.all()):
            failure = "There is no guess with finite pixels for this image."
    return Match(
        originals=originals, labels=labels, guesses=guesses, guessed_labels=guessed_labels, order=order, failure=failure
    )


def assign(guesses: Tensor, truths: Tensor) -> Tensor:
    """Assign guesses to originals with the least total squared error, exact ones first.

    Args:
        guesses: (G, C, H, W); those that are not finite are left out.
        truths: (B, C, H, W).

    Returns:
        (B,) index of each original's guess, -1 without one.

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
        truths.flatten(1).double(), guesses[candidates].flatten(1).double(), compute_mode="donot_use_mm_for_euclid_dist"
    )
    cost = distance.square()
    cost[distance < _SAME * truths[0].numel() ** 0.5] -= len(truths) * cost.max()
    rows, columns = linear_sum_assignment(cost.cpu().numpy())
    order[torch.as_tensor(rows)] = candidates.cpu()[torch.as_tensor(columns)]
    return order


def hard_labels(labels: Tensor) -> Tensor:
    """Return class indices (N,) of labels (N,) or class probabilities (N, K)."""
    return labels.argmax(1) if labels.ndim == 2 else labels


def pair_labels(guesses: Tensor, truths: Tensor) -> Tensor:
    """Order ``guesses`` (B,) so that most equal ``truths`` (B,), keeping those in place.

    Labels are recovered for a batch, so their score must not depend on the matching of pixels.
    """
    order = (guesses != truths).long().argsort(stable=True)
    guesses, truths = guesses[order], truths[order]
    same = _numbered(truths)[:, None] == _numbered(guesses)
    paired = truths.clone()
    paired[~same.any(1)] = guesses[~same.any(0)]
    return paired[order.argsort()]


def _numbered(labels: Tensor) -> Tensor:
    """Make labels (B,) distinct by the number of earlier occurrences."""
    return labels * len(labels) + (labels[:, None] == labels).tril(-1).sum(1)


def label_correct(guesses: Tensor, truths: Tensor) -> Tensor:
    """Score 1 if the class is right, else 0: (N,) float64 from labels (N,) or (N, K)."""
    return (hard_labels(guesses) == hard_labels(truths)).double()
