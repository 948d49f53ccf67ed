"""Look up the originals behind an update, for scoring only."""

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
"""States of simulated clients by id; users of a state share the examples that a defense made."""

_AT_ONCE = 256
"""Images converted to floats at a time."""


def fresh_states() -> ClientStates:
    """Return the states of clients before any work."""
    return defaultdict(ClientState)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroundTruth:
    """Looks up victims in the simulated clients' data, and replays their uploads; none of it is ever sent.

    Attributes:
        batch_size: examples of a probed batch.
        states: clients' states at the upload.
    """

    clients: Mapping[int, Client]
    batch_size: int
    states: ClientStates = field(default_factory=fresh_states)
    _replays: dict[VictimId, Replay] = field(default_factory=dict, init=False, repr=False)

    def batch(self, victim: VictimId) -> Batch:
        """Return the examples behind ``victim``, or the client's nearest own images if a defense replaces them."""
        client, state = self.clients[victim.client], self.states[victim.client]
        batch = examples_behind(client, victim, state, batch_size=self.batch_size)
        return _nearest(client, batch) if client.defense.examples else batch

    def replay(self, observation: Observation) -> Replay:
        """Replay an upload with the same random streams: the model's inputs, and the undefended update.

        The replays of the last round are cached, since labels and all attackers' scores need them.
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
    """Return ``True`` if the model sees other images than the originals in a ``probe`` or an ``update``."""
    augmented = plan.augments if uploads == "update" else plan.augment_probes
    return bool(defense.examples or defense.data) or augmented


def _nearest(client: Client, batch: Batch) -> Batch:
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
