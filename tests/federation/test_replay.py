"""What a simulation computes of an upload again, and how little it trains for that."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_privacy.defenses import ClientState, Defense, LocalStep, defense as local_steps
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors, VictimId
from tests.federation import harness

SENT = ModelState.of(harness.small_net())
VICTIMS = {"probe": VictimId(2, 0, 1), "update": VictimId(2, 0)}
SIZE = 4


def noisy(gradient: Tensors, step: LocalStep) -> Tensors:
    """Draws from the stream that the next batch is brightened by."""
    return {name: t + 0.1 * torch.randn(t.shape, generator=step.rng) for name, t in gradient.items()}


DEFENSE = Defense(data=(harness.brightened,), gradient=(noisy,), upload=(harness.with_noise,))


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record an entry for each gradient that a client takes."""
    taken: list[Any] = []
    real = local_steps.loss_gradients
    monkeypatch.setattr(local_steps, "loss_gradients", lambda *a, **k: taken.append(a) or real(*a, **k))
    return taken


@pytest.mark.parametrize("victim", VICTIMS.values(), ids=VICTIMS)
@pytest.mark.parametrize("plan", [harness.FEDAVG, harness.FEDSGD], ids=["epochs", "one step"])
def test_it_is_what_the_client_saw(plan: LocalPlan, victim: VictimId) -> None:
    seen: list[Tensor] = []

    def watched(batch: Batch, state: ClientState, rng: torch.Generator) -> Batch:
        seen.append(batch.inputs)
        return batch

    client = harness.clients(plan, DEFENSE)[0]
    watching = replace(client, defense=replace(DEFENSE, data=(*DEFENSE.data, watched)))
    if victim.probe is None:
        watching.update(SENT, ClientState(), round=2)
    else:
        watching.probe(SENT, ClientState(), round=2, probe=victim.probe, batch_size=SIZE)
    replay = harness.replay(client, victim, SIZE)
    visits = torch.cat(seen)
    found = [int((visits == image).flatten(1).all(1).nonzero()[0]) for image in replay.transformed.inputs]
    assert sorted(found) == list(range(len(replay.examples)))  # all are in the first pass
    ratio = replay.transformed.inputs / replay.examples.inputs.clamp_min(1e-9)
    assert all(len(r[r > 0].round(decimals=4).unique()) == 1 for r in ratio)


@pytest.mark.parametrize("victim", VICTIMS.values(), ids=VICTIMS)
def test_the_undefended_update_is_that_of_a_client_without_defense(victim: VictimId) -> None:
    replay = harness.replay(harness.clients(harness.FEDAVG, DEFENSE)[0], victim, SIZE)
    plain = harness.replay(harness.clients(harness.FEDAVG, Defense())[0], victim, SIZE)
    harness.assert_same_tensors(replay.undefended().tensors, plain.undefended().tensors)
    client = harness.clients(harness.FEDAVG, Defense())[0]
    made = (
        client.update(SENT, ClientState(), round=2)
        if victim.probe is None
        else client.probe(SENT, ClientState(), round=2, probe=victim.probe, batch_size=SIZE)
    )
    harness.assert_same_tensors(replay.undefended().tensors, made.upload.tensors)


def test_nothing_is_trained_to_see_what_one_step_took(gradients: list[Any]) -> None:
    replay = harness.replay(harness.clients(harness.FEDSGD, DEFENSE)[0], VICTIMS["probe"], SIZE)
    assert len(replay.transformed) == len(replay.examples) == SIZE
    assert not gradients
    assert replay.undefended().num_examples == len(replay.transformed) == SIZE
    assert len(gradients) == 1


def test_of_several_steps_those_are_trained_that_lie_before_the_last_first_visit(gradients: list[Any]) -> None:
    replay = harness.replay(harness.clients(harness.FEDAVG, DEFENSE)[0], VICTIMS["update"])
    assert len(replay.transformed) == harness.EXAMPLES_EACH
    assert len(gradients) == 2  # the first pass has three batches, the plan two passes
    assert replay.undefended().num_examples == len(replay.transformed)
    assert len(gradients) == 2 + 6


def test_what_a_replay_needs_is_left_as_it_was() -> None:
    client = harness.clients(harness.FEDAVG, harness.HEAD)[0]
    state = ClientState()
    client.update(SENT, state, round=1)
    before = dict(state.tensors)
    replay = replace(harness.replay(client, VICTIMS["update"]), state=state)
    assert len(replay.transformed) and replay.undefended().tensors
    harness.assert_same_tensors(state.tensors, before)
