"""The tracing attack on what was reconstructed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_privacy.federation import Client
from fl_privacy.metrics import VictimScore
from fl_privacy.metrics.tracing import Tracing, nearest, tracing_distance
from fl_privacy.rng import derive_generator

PARTICIPANTS = 10
"""Among so many the images of a single client are dealt, as in SPN's Algorithm 6."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tracer:
    """Counts how often an image is traced to somebody else by its nearest reconstruction.

    Every image that was attacked is asked for. Its owner is the client that it was attacked at; where all are of one
    client, the images are dealt to ``participants`` in order, also those of one batch, so that batches of any size are
    traced among as many. Fewer images than participants are one each. With ``queries`` other images of the attacked
    clients are asked for as well, drawn at random and dealt in the same way.

    Attributes:
        participants: among so many the images of a single client are dealt.
        clients: whose images may be asked for, by id.
        queries: how many images are asked for, if there are as many and not fewer were attacked; ``None`` asks for
            those attacked alone.
        seed: of the run.
    """

    participants: int = PARTICIPANTS
    clients: Mapping[int, Client] = field(default_factory=dict)
    queries: int | None = None
    seed: int = 0

    def __call__(self, scores: Sequence[VictimScore]) -> Tracing | None:
        """Of ``scores``; ``None`` where there are no two owners.

        Images that an attack found nothing for are traced wrongly, but victims on which it failed are left out: that
        says nothing of where images come from. So are those whose truth is not known, and texts, which nothing is
        nearest to.
        """
        known = [(score, score.originals) for score in scores if score.originals is not None and _counts(score)]
        if not known:
            return None
        scores = [score for score, _ in known]
        attacked = torch.cat([originals for _, originals in known])
        at = torch.cat([torch.full((len(originals),), score.id.client) for score, originals in known])
        others, of = self._others(attacked, at)
        shared = len(at.unique()) == 1
        owners = _dealt(len(at), torch.arange(self.participants)) if shared else at
        number = len(owners.unique())
        if number < 2:
            return None
        query_owners = torch.cat([owners, _dealt(len(of), owners.unique()) if shared else of])
        guessed = torch.cat([_guessed(score) for score in scores])
        distance = of_attacked = 1.0
        if guessed.any():
            answers = torch.cat([score.guesses for score in scores])[guessed], owners[guessed]
            distance = tracing_distance(*answers, torch.cat([attacked, others]), query_owners)
            of_attacked = tracing_distance(*answers, attacked, owners)
        return Tracing(distance=distance, attacked_distance=of_attacked, participants=number, queries=len(query_owners))

    def _others(self, attacked: Tensor, clients: Tensor) -> tuple[Tensor, Tensor]:
        """(n, C, H, W) further images of ``clients``, none of which was ``attacked``, and (n,) whose they are."""
        room = (self.queries or 0) - len(attacked)
        if room <= 0:
            return attacked[:0], clients[:0]
        asked = [self.clients[client] for client in clients.unique().tolist()]
        owners = torch.cat([torch.full((len(client.indices),), client.id) for client in asked])
        order = torch.randperm(len(owners), generator=derive_generator(self.seed, "tracing"))
        order = order[: room + len(attacked)]
        images = asked[0].examples.batch(torch.cat([client.indices for client in asked])[order]).inputs
        new = (nearest(attacked, images)[0] > 0).nonzero().flatten()[:room]
        return images[new], owners[order[new]]


def _dealt(number: int, owners: Tensor) -> Tensor:
    """(number,) the ``owners`` of images in order, equal shares each."""
    return owners[torch.arange(number) * len(owners) // max(1, number)]


def _counts(score: VictimScore) -> bool:
    return not score.sentences and all(image.failure is None for image in score.images)


def _guessed(score: VictimScore) -> Tensor:
    """(B,) which of the images have a guess."""
    return torch.tensor([image.guess is not None for image in score.images])
