"""Who trains on what: what nobody does, and what a partition returned, which may be somebody else's code."""

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig

from fl_privacy.data import LabelledExamples
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator

DEFENDERS = 1000
"""Public examples that clients hold, at most."""


def expect_parts(parts: Any, clients: int, examples: int, section: DictConfig) -> None:
    """Refuse what is no partition: for each client (N_i,) int64 indices, no example twice."""
    wrong = None
    if not isinstance(parts, Sequence) or isinstance(parts, str) or len(parts) != clients:
        wrong = f"got {type(parts).__name__}"
    elif not all(isinstance(p, torch.Tensor) and p.dtype == torch.int64 and p.dim() == 1 and len(p) for p in parts):
        wrong = f"got {', '.join(sorted({type(p).__name__ for p in parts}))} of other types or shapes"
    elif not torch.cat(list(parts)).ge(0).all() or not torch.cat(list(parts)).lt(examples).all():
        wrong = f"some are beyond 0..{examples - 1}"
    elif len(torch.cat(list(parts)).unique()) != sum(map(len, parts)):
        wrong = "some examples have two owners"
    if wrong:
        raise UserError(
            f"partition._target_={section.get('_target_')} is expected to return indices (N,) int64 for each of"
            f" {clients} clients, but {wrong}."
        )


def held_out(number: int, examples: int, *, seed: int) -> torch.Tensor:
    """(N,) which of the ``examples`` training examples no client gets: ``number`` of them, at random.

    Raises:
        UserError: none would be left.
    """
    if number >= examples:
        raise UserError(
            f"holdout is expected to be below {examples}, the number of training examples, but got {number};"
            " leave some to train on."
        )
    chosen = torch.zeros(examples, dtype=torch.bool)
    if number:
        order = torch.randperm(examples, generator=derive_generator(seed, "holdout"))
        chosen[order[:number]] = True
    return chosen


def defenders_examples(unattacked: LabelledExamples) -> torch.Tensor:
    """Which of the public examples clients hold that train a defense on some: every fourth; attackers hold others."""
    return torch.arange(3, len(unattacked), 4)[:DEFENDERS]
