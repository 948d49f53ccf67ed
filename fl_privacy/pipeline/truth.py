"""What really was behind an update; only the evaluation asks."""

from collections.abc import Callable, Mapping

from fl_privacy.federation import Participant, parse_observation_id
from fl_privacy.types import Batch

Truth = Callable[[str], Batch]
"""Observation id -> the batch behind it."""


def truth_of(participants: Mapping[int, Participant], batch_size: int) -> Truth:
    """Looks victims up in the simulated clients' data; nothing of it ever travels."""

    def find(observation_id: str) -> Batch:
        round, client, probe = parse_observation_id(observation_id)
        participant = participants[client]
        if probe is None:
            return participant.trained_batch(round=round)
        return participant.victim_batch(probe.victim, batch_size)

    return find
