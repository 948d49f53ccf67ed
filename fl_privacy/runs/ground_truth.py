"""What really was behind an update; only the evaluation asks."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.federation import Client, Replay, examples_behind
from fl_privacy.measure.matching import hard_labels
from fl_privacy.types import Batch, LocalPlan, Observation, VictimId

ClientStates = defaultdict[int, ClientState]
"""Of the simulated clients, by id; what a defense makes of a client's examples is made once for all who share them."""

_AT_ONCE = 256
"""Images that are floats at the same time."""


def fresh_states() -> ClientStates:
    """Return the states of clients that have done nothing yet."""
    return defaultdict(ClientState)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroundTruth:
    """Looks victims up in the simulated clients' data, and repeats what these did; nothing of it ever travels.

    Attributes:
        clients: by id.
        batch_size: examples of a probed batch.
        states: that the clients have by then.
    """

    clients: Mapping[int, Client]
    batch_size: int
    states: ClientStates = field(default_factory=fresh_states)
    _replays: dict[VictimId, Replay] = field(default_factory=dict, init=False, repr=False)

    def batch(self, victim: VictimId) -> Batch:
        """Return the examples behind ``victim``.

        Where a defense exchanges a client's examples, the truth of each is the client's own image nearest to it.
        """
        client, state = self.clients[victim.client], self.states[victim.client]
        batch = examples_behind(client, victim, state, batch_size=self.batch_size)
        return _nearest(client, batch) if client.defense.examples else batch

    def replay(self, observation: Observation) -> Replay:
        """Repeat the making of an upload, by the same random streams: what the model saw, and what was undefended.

        There is one for each victim of the round asked for last: labels and scores of all attackers need the same.
        """
        id = observation.id
        if any(known.round != id.round for known in self._replays):
            self._replays.clear()
        if id not in self._replays:
            self._replays[id] = Replay(
                client=self.clients[id.client],
                victim=id,
                sent=observation.sent,
                state=self.states[id.client],
                batch_size=self.batch_size,
            )
        return self._replays[id]


def sees_other_images(defense: Defense, plan: LocalPlan, uploads: str) -> bool:
    """Say whether the model sees other images than the truth behind a ``probe`` or an ``update``."""
    augmented = plan.augments if uploads == "update" else plan.augment_probes
    return bool(defense.examples or defense.data) or augmented


def _nearest(client: Client, batch: Batch) -> Batch:
    """Return the client's own images nearest to those of ``batch``, of the same class where there are any.

    Only images of these classes are looked at, as few at a time as fill a processor's cache.
    """
    labels = hard_labels(batch.labels)
    own = client.examples.labels[client.indices].to(labels.device)
    nearest = torch.empty_like(batch.inputs)
    for label in labels.unique():
        asked, rivals = labels == label, client.indices[(own == label).to(client.indices.device)]
        nearest[asked] = _nearest_of(client, batch.inputs[asked], rivals if len(rivals) else client.indices)
    return Batch(nearest, labels)


def _nearest_of(client: Client, images: Tensor, rivals: Tensor) -> Tensor:
    """Return the nearest of the client's images ``rivals`` to each of ``images`` (N, ...)."""
    distances = torch.cat(
        [
            torch.cdist(images.flatten(1), client.examples.batch(some, client.device).inputs.flatten(1))
            for some in torch.split(rivals, _AT_ONCE)
        ],
        dim=1,
    )
    closest: Tensor = client.examples.batch(rivals[distances.argmin(1).to(rivals.device)], client.device).inputs
    return closest
