"""The tracing attack on what was reconstructed."""

from collections.abc import Sequence

import torch
from omegaconf import DictConfig
from torch import Tensor

from fl_privacy.config.build import positive
from fl_privacy.federation import parse_observation_id
from fl_privacy.metrics import VictimScore
from fl_privacy.metrics.tracing import Tracing, tracing_distance

PARTICIPANTS = 10
"""Among so many the victims of a single client are dealt, as in SPN's Algorithm 6."""


def traced(scores: Sequence[VictimScore], *, participants: int) -> Tracing | None:
    """How often the images behind ``scores`` are traced to somebody else by their nearest reconstruction.

    Every image that was attacked is asked for. Its owner is the client that it was attacked at; where all are of one
    client, they are dealt to ``participants`` in order.

    Returns:
        ``None`` where there is only one owner, or nothing was reconstructed.
    """
    clients = [parse_observation_id(score.id)[1] for score in scores]
    if len(set(clients)) == 1:
        clients = [k * participants // len(scores) for k in range(len(scores))]
    guesses = [score.guesses[_guessed(score)] for score in scores]
    owners = [torch.full((len(found),), client) for found, client in zip(guesses, clients, strict=True)]
    if len(set(clients)) < 2 or not sum(map(len, guesses)):
        return None
    distance = tracing_distance(
        torch.cat(guesses),
        torch.cat(owners),
        torch.cat([score.originals for score in scores]),
        torch.cat([torch.full((len(s.originals),), c) for s, c in zip(scores, clients, strict=True)]),
    )
    queries = sum(len(score.originals) for score in scores)
    return Tracing(distance=distance, participants=len(set(clients)), queries=queries)


def tracing_participants(config: DictConfig) -> int:
    """Among how many the victims of a single client are dealt, by ``config``."""
    return PARTICIPANTS if config.tracing is None else positive(config.tracing, "tracing")


def _guessed(score: VictimScore) -> Tensor:
    """(B,) which of the images have a guess."""
    return torch.tensor([image.guess is not None for image in score.images])
