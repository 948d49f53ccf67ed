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
"""Among so many the images of a single client are dealt, as in SPN's Algorithm 6."""


def traced(scores: Sequence[VictimScore], *, participants: int) -> Tracing | None:
    """How often the images behind ``scores`` are traced to somebody else by their nearest reconstruction.

    Every image that was attacked is asked for. Its owner is the client that it was attacked at; where all are of one
    client, the images are dealt to ``participants`` in order, also those of one batch, so that batches of any size are
    traced among as many. Fewer images than participants are one each.

    Returns:
        ``None`` where there is only one owner. Where nothing was reconstructed, all are traced wrongly.
    """
    owners = torch.cat([torch.full((len(s.originals),), parse_observation_id(s.id)[1]) for s in scores])
    if len(owners.unique()) == 1:
        owners = torch.arange(len(owners)) * participants // len(owners)
    number = len(owners.unique())
    if number < 2:
        return None
    guessed = torch.cat([_guessed(score) for score in scores])
    distance = 1.0
    if guessed.any():
        guesses = torch.cat([score.guesses[_guessed(score)] for score in scores])
        queries = torch.cat([score.originals for score in scores])
        distance = tracing_distance(guesses, owners[guessed], queries, owners)
    return Tracing(distance=distance, participants=number, queries=len(owners))


def tracing_participants(config: DictConfig) -> int:
    """Among how many the images of a single client are dealt, by ``config``."""
    return PARTICIPANTS if config.tracing is None else positive(config.tracing, "tracing")


def _guessed(score: VictimScore) -> Tensor:
    """(B,) which of the images have a guess."""
    return torch.tensor([image.guess is not None for image in score.images])
