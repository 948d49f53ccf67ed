"""The guard refuses each crafted model for its reason, and takes honest ones."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.attacks.malicious import (
    Fishing,
    Imprint,
    Inconsistent,
    Loki,
    MembershipTrap,
    ServerAttack,
    TrapWeights,
)
from fl_privacy.defenses import ClientState
from fl_privacy.defenses.guard import ModelGuard, RefusedModelError
from fl_privacy.federation import Client, Failure, Server, ServerPlan, attempt
from fl_privacy.types import LocalPlan, ModelState

from ..malicious import rounds

CRAFTED = {
    "imprint": (Imprint(bins=64), "lenet", "rows of imprint.measure.weight are the same"),
    "loki": (Loki(bins=64), "resnet", "rows of imprint.measure.weight are the same"),
    "trap_weights": (TrapWeights(), "mlp", "lets .* of this client's examples through"),
    "fishing": (Fishing(), "lenet", "of the rows of classifier.weight are zero"),
    "inconsistent": (Inconsistent(client=1), "resnet", "is zero|lets 0.0%"),
    "membership_trap": (MembershipTrap(), "mlp", r"rows of features\.[02]\.weight"),
}


@pytest.mark.parametrize(("attack", "name", "reason"), CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_model_is_refused(attack: ServerAttack, name: str, reason: str) -> None:
    attack = attack.informed(rounds.public())
    model = attack.architecture(rounds.network(name), (1, 28, 28), 4)
    client = replace(rounds.client(model, LocalPlan()), guard=ModelGuard())
    sent = attack.craft(model, ModelState.of(model), 0)
    with pytest.raises(RefusedModelError, match=reason):
        client.update(sent, ClientState(), round=1)
    if attack.architecture(model, (1, 28, 28), 4) is not model:
        agreed = replace(client, guard=ModelGuard().agreeing_on(rounds.network(name)))
        with pytest.raises(RefusedModelError, match="it has imprint, which was not agreed on"):
            agreed.update(sent, ClientState(), round=1)


@pytest.mark.long
@pytest.mark.parametrize("name", rounds.NETWORKS)
def test_an_honest_training_is_let_through(name: str) -> None:
    plan = LocalPlan(shares="delta", lr=0.05, steps=5, batch_size=20, momentum=0.9)
    model = rounds.network(name)
    guard = ModelGuard().agreeing_on(model)
    clients = {k: replace(rounds.client(model, plan, id=k), guard=guard) for k in range(2)}
    server = Server(state=ModelState.of(model), local_plan=plan, plan=ServerPlan(), clients=[0, 1], seed=0)
    states = {k: ClientState() for k in clients}
    for round in range(1, 6):
        server.receive({k: c.update(server.state, states[k], round=round).upload for k, c in clients.items()})
    assert all(any(name.startswith("guard/") for name in state.tensors) for state in states.values())


def test_a_replaced_layer_is_seen_against_the_round_before() -> None:
    model = rounds.network("lenet")
    client, state = replace(rounds.client(model, LocalPlan()), guard=ModelGuard()), ClientState()
    client.update(ModelState.of(model), state, round=1)
    with pytest.raises(RefusedModelError, match="was replaced since the round before"):
        client.update(ModelState.of(rounds.network("lenet", seed=1)), state, round=2)
    grown = {n: 9 * p for n, p in ModelState.of(model).parameters.items()}
    with pytest.raises(RefusedModelError, match=r"9\.0 times as large"):
        client.update(ModelState(grown), state, round=2)


def test_a_refusal_is_a_reason_and_the_others_go_on() -> None:
    attack = Imprint(bins=64).informed(rounds.public())
    model = attack.architecture(rounds.network("lenet"), (1, 28, 28), 1)
    sent = attack.craft(model, ModelState.of(model), 0)
    plain = rounds.client(model, LocalPlan())
    guarded: Client = replace(rounds.client(model, LocalPlan(), id=1), guard=ModelGuard())
    replies = {c.id: attempt(lambda c=c: c.update(sent, ClientState(), round=1)) for c in (plain, guarded)}
    assert isinstance(replies[1], Failure)
    assert replies[1].reason.startswith("RefusedModelError: The model was refused: ")
    assert "\n" not in replies[1].reason
    server = Server(state=sent, local_plan=plain.plan, plan=ServerPlan(), clients=[0, 1], seed=0)
    excluded = server.receive({0: replies[0].upload, 1: replies[1]})
    assert list(excluded) == [1]
    before = server.state
    assert list(server.receive({1: replies[1]})) == [1]
    assert server.state is before


def test_the_guard_leaves_the_update_as_it_is() -> None:
    model = rounds.network("resnet")
    plain = rounds.client(model, LocalPlan(batch_size=20))
    mine, other = ClientState(), ClientState()
    ours = replace(plain, guard=ModelGuard()).update(ModelState.of(model), mine, round=1)
    theirs = plain.update(ModelState.of(model), other, round=1)
    assert all(torch.equal(t, ours.upload.tensors[n]) for n, t in theirs.upload.tensors.items())
    assert all(torch.equal(t, ours.upload.buffers[n]) for n, t in theirs.upload.buffers.items())
