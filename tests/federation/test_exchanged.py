"""Defenses that exchange a client's examples or transform its batches, and what they put in place of the originals."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.defenses import ClientState, Defense
from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.types import LocalPlan, ModelState, VictimId
from tests.federation import harness

SENT = ModelState.of(harness.small_net())
EVAL = LocalPlan(batch_norm="eval")


def defended_client(defense: Defense, plan: LocalPlan = EVAL) -> Client:
    return harness.clients(plan, defense)[0]


def test_a_client_trains_on_what_its_examples_are_exchanged_for() -> None:
    defense = replace(harness.DATA, data=(), upload=())
    result = defended_client(defense, LocalPlan(shares="delta", epochs=1, batch_size=3)).update(
        SENT, ClientState(), round=1
    )
    assert result.upload.num_examples == 8
    assert result.defense_seconds > 0


def test_what_is_made_once_is_kept_and_probes_leave_the_rest_alone() -> None:
    state = ClientState()
    probe = defended_client(harness.DATA).probe(SENT, state, round=1, probe=0, batch_size=2)
    assert set(state.tensors) == {"exchange/noise"}
    noise = state.tensors["exchange/noise"]
    defended_client(harness.DATA).update(SENT, state, round=2)
    assert state.tensors["exchange/noise"] is noise
    again = defended_client(harness.DATA).probe(SENT, ClientState(), round=1, probe=0, batch_size=2)
    harness.assert_same_tensors(probe.upload.tensors, again.upload.tensors)


def test_how_many_there_will_be_is_known_before() -> None:
    assert defended_client(harness.DATA).number_of_examples == 8
    assert defended_client(Defense()).number_of_examples == harness.EXAMPLES_EACH


def test_there_are_as_many_victims_as_exchanged_examples() -> None:
    client = defended_client(harness.DATA)
    found = [client.victim_batch(k, 2, ClientState()).inputs for k in range(4)]
    assert len({tuple(image.flatten().tolist()) for batch in found for image in batch}) == 8
    with pytest.raises(UserError, match="has 8"):
        client.victim_batch(4, 2)


def gradient_of(batch, name="out.weight"):
    model = harness.small_net().eval()
    torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    return dict(model.named_parameters())[name].grad


def test_the_transformed_victim_is_what_the_upload_is_the_gradient_of() -> None:
    client = defended_client(replace(harness.DATA, upload=()))
    for round, victim in ((1, 0), (2, 3)):
        probe = client.probe(SENT, ClientState(), round=round, probe=victim, batch_size=2)
        seen = harness.replay(client, VictimId(round, 0, victim), 2).transformed
        torch.testing.assert_close(probe.upload.tensors["out.weight"], gradient_of(seen))


def test_the_transformed_batch_is_what_the_update_is_the_gradient_of() -> None:
    client = defended_client(replace(harness.DATA, upload=()), replace(EVAL, batch_size=5))
    update = client.update(SENT, ClientState(), round=3)
    seen = harness.replay(client, VictimId(3, 0)).transformed
    torch.testing.assert_close(update.upload.tensors["out.weight"], gradient_of(seen))


@pytest.mark.parametrize("plan", [EVAL, harness.FEDAVG], ids=["one step", "epochs"])
def test_transformed_images_come_in_the_order_of_the_originals(plan: LocalPlan) -> None:
    client = defended_client(Defense(data=(harness.brightened,)), plan)
    updated = harness.replay(client, VictimId(2, 0))
    pairs = [
        (
            client.victim_batch(1, 4),
            harness.replay(client, VictimId(1, 0, 1), 4).transformed,
        ),
        (updated.examples, updated.transformed),
    ]
    for original, transformed in pairs:
        assert torch.equal(original.labels, transformed.labels)
        share = (transformed.inputs.flatten(1) * original.inputs.flatten(1)).sum(1) / original.inputs.flatten(
            1
        ).square().sum(1)
        assert torch.allclose(transformed.inputs, original.inputs * share.view(-1, 1, 1, 1), atol=1e-6)
