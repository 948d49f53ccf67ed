"""How far the defense moved the updates that were intercepted."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from torch import nn

from fl_privacy.attacks.exact.first_layer import NotFullyConnectedError, first_layer
from fl_privacy.attacks.gradient_inversion.targets import is_sum_of_gradients
from fl_privacy.experiment.ground_truth import ClientStates, fresh_states
from fl_privacy.federation import Client, Replay
from fl_privacy.metrics.distortion import Perturbation, linear_system, perturbation
from fl_privacy.types import ModelState, Observation, Tensors

UpdateDistortion = Callable[[Observation], tuple[Perturbation, Mapping[str, float]]]
"""Compares an intercepted update with the one its client would have uploaded without defense. Where the model's first
layer is fully connected and the update is of one example, also figures of the equations for its input: ``condition`` of
them all, and ``contraction``, ``error_bound`` and ``solvable`` (1 or 0) of the row whose uploaded bias gradient is
largest, which an attacker would trust most."""


def update_distortion_of(
    clients: Mapping[int, Client], batch_size: int, states: ClientStates | None = None
) -> UpdateDistortion:
    """Computes the undefended update anew from the simulated client's data; the attacker never sees it."""
    states = fresh_states() if states is None else states

    @cache
    def layer(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[str, str] | None:
        try:
            found = first_layer(model, ModelState.of(model), input_shape)
        except NotFullyConnectedError:
            return None
        return found.weight, found.bias

    def measure(observation: Observation) -> tuple[Perturbation, Mapping[str, float]]:
        id, sent = observation.id, observation.sent
        replay = Replay(client=clients[id.client], victim=id, sent=sent, state=states[id.client], batch_size=batch_size)
        clean, seen = replace(observation, upload=replay.undefended).update(), observation.update()
        alone = observation.upload.num_examples == 1 and is_sum_of_gradients(observation.plan)
        names = layer(observation.model, observation.input_shape) if alone else None
        return perturbation(clean, seen), _solving(clean, seen, names) if names else {}

    return measure


def _solving(clean: Tensors, seen: Tensors, names: tuple[str, str]) -> dict[str, float]:
    weight, bias = names
    if weight not in seen or bias not in seen:
        return {}
    tensors = (clean[weight], clean[bias]), (seen[weight], seen[bias])
    trusted = linear_system(*tensors, rows=1)
    return {
        "condition": linear_system(*tensors).condition,
        "contraction": trusted.contraction,
        "error_bound": trusted.error_bound,
        "solvable": float(trusted.solvable),
    }
