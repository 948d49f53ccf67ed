"""A reconstruction laid beside its truth."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.metrics.assignment import assign
from fl_privacy.metrics.labels import hard_labels, pair_labels
from fl_privacy.types import Batch, Reconstruction


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """Guesses in the order of the truths, on the CPU.

    Attributes:
        originals: (B, C, H, W).
        labels: (B,) class indices.
        guesses: (B, C, H, W) clamped to [0, 1]; zeros where there is none.
        guessed_labels: (B,) class indices, in the order that finds most of ``labels``; -1 where there is none.
        order: (B,) index of the guess in the reconstruction; -1 where there is none.
        failure: why guesses are missing.
    """

    originals: Tensor
    labels: Tensor
    guesses: Tensor
    guessed_labels: Tensor
    order: Tensor
    failure: str | None

    @property
    def found(self) -> Tensor:
        """(F,) indices of the truths that have a guess."""
        return (self.order >= 0).nonzero().flatten()


def match(reconstruction: Reconstruction, truth: Batch) -> Match:
    """Assign the guesses of ``reconstruction`` to the images of ``truth``."""
    originals, labels = truth.inputs.detach().cpu(), hard_labels(truth.labels.detach().cpu())
    order = torch.full((len(originals),), -1)
    guesses, guessed_labels = torch.zeros_like(originals), torch.full_like(labels, -1)
    failure = _failure(reconstruction, originals)
    if failure is None and reconstruction.batch is not None:
        batch = reconstruction.batch
        inputs = batch.inputs.detach().cpu().to(originals.dtype)
        order = assign(inputs, originals)
        found = order >= 0
        guesses[found] = inputs[order[found]].clamp(0, 1)
        in_order = hard_labels(batch.labels.detach().cpu())[order[found]].to(labels.dtype)
        guessed_labels[found] = pair_labels(in_order, labels[found])
        if not bool(found.all()):
            failure = "There is no guess with finite pixels for this image."
    return Match(
        originals=originals,
        labels=labels,
        guesses=guesses,
        guessed_labels=guessed_labels,
        order=order,
        failure=failure,
    )


def _failure(reconstruction: Reconstruction, originals: Tensor) -> str | None:
    if reconstruction.failure is not None:
        return reconstruction.failure
    if reconstruction.batch is None:
        return "The attack made no guess."
    if (got := tuple(reconstruction.batch.inputs.shape[1:])) != (expected := tuple(originals.shape[1:])):
        return f"The guess is expected to have the shape {expected}, but has {got}."
    return None
