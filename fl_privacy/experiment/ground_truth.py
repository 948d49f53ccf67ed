"""What really was behind an update; only the evaluation asks."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.federation import Client, Replay, examples_behind
from fl_privacy.metrics.matching import hard_labels
from fl_privacy.types import Batch, LocalPlan, Observation, VictimId

GroundTruth = Callable[[VictimId], Batch]
"""Observation id -> the batch behind it."""

Transformed = Callable[[Observation], Batch]
"""What the model saw in place of the images behind an observation, in the order of their truth."""


ClientStates = defaultdict[int, ClientState]
"""Of the simulated clients, by id; what a defense makes of a client's examples is made once for all who share them."""


def fresh_states() -> ClientStates:
    """Of clients that have done nothing yet."""
    return defaultdict(ClientState)


def ground_truth_of(clients: Mapping[int, Client], batch_size: int, states: ClientStates | None = None) -> GroundTruth:
    """Looks victims up in the simulated clients' data; nothing of it ever travels.

    Where a defense exchanges a client's examples, the truth of each is the client's own image nearest to it.
    """
    states = fresh_states() if states is None else states

    def find(victim: VictimId) -> Batch:
        client, state = clients[victim.client], states[victim.client]
        batch = examples_behind(client, victim, state, batch_size=batch_size)
        return _nearest(client, batch) if client.defense.examples else batch

    return find


def trains_on_others(defense: Defense, plan: LocalPlan, target: str) -> bool:
    """Whether the model sees other images than the truth behind a ``probe`` or an ``update``."""
    augmented = plan.augments if target == "update" else plan.augment_probes
    return bool(defense.examples or defense.data) or augmented


def transformed_of(clients: Mapping[int, Client], batch_size: int, states: ClientStates | None = None) -> Transformed:
    """Repeats what augmentation and the clients' defenses did to the data, by the same random streams."""
    states = fresh_states() if states is None else states

    def find(observation: Observation) -> Batch:
        client, state = clients[observation.id.client], states[observation.id.client]
        return Replay(
            client=client, victim=observation.id, sent=observation.sent, state=state, batch_size=batch_size
        ).transformed

    return find


def _nearest(client: Client, batch: Batch) -> Batch:
    """The client's own images nearest to those of ``batch``, among those of the same class where there are any."""
    own = client.examples.batch(client.indices, client.device)
    labels = hard_labels(batch.labels)
    distances = torch.cdist(batch.inputs.flatten(1), own.inputs.flatten(1))
    other = labels[:, None] != own.labels
    distances = distances.masked_fill(other & ~other.all(1, keepdim=True), float("inf"))
    return Batch(own.inputs[distances.argmin(1)], labels)
