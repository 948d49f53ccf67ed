"""How far the defense moved the updates that were intercepted."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from fl_privacy.defenses import Defense
from fl_privacy.federation import Participant, parse_observation_id
from fl_privacy.metrics.perturbation import Perturbation, perturbation
from fl_privacy.pipeline.truth import ClientStates, fresh_states
from fl_privacy.types import Observation

Disturbance = Callable[[Observation], Perturbation]
"""Compares an intercepted update with the one its client would have uploaded without defense."""


def disturbance_of(
    participants: Mapping[int, Participant], batch_size: int, states: ClientStates | None = None
) -> Disturbance:
    """Computes the undefended update anew from the simulated client's data; the attacker never sees it."""
    states = fresh_states() if states is None else states

    def measure(observation: Observation) -> Perturbation:
        round, client, probe = parse_observation_id(observation.id)
        undefended, state = _undefended(participants[client]), states[client]
        if probe is None:
            result = undefended.update(observation.sent, state, round=round)
        else:
            result = undefended.probe(observation.sent, state, round=round, victim=probe.victim, batch_size=batch_size)
        clean = replace(observation, upload=result.upload)
        return perturbation(clean.update(), observation.update())

    return measure


def _undefended(participant: Participant) -> Participant:
    """With the same examples to exchange, so that the same are compared."""
    return replace(participant, defense=Defense(examples=participant.defense.examples))
