"""A simulated client: the same streams whatever happened before, disjoint victims, its own private model."""

from dataclasses import replace

import pytest
import torch

from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Probe, audited_rounds, spread_probes
from fl_privacy.federation.client import local_batches
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import LocalPlan, ModelState, VictimId
from tests.federation import harness

SENT = ModelState.of(harness.small_net())


def test_a_round_is_the_same_whatever_came_before() -> None:
    clients = harness.clients()
    clients[1].update(SENT, ClientState(), round=1)
    torch.rand(3)

    again = clients[1].update(SENT, ClientState(), round=2)

    fresh = harness.clients()[1].update(SENT, ClientState(), round=2)
    harness.assert_same_tensors(again.upload.tensors, fresh.upload.tensors)


def test_clients_and_rounds_have_their_own_noise() -> None:
    clients = harness.clients(LocalPlan(shares="delta", lr=1e-9, steps=1))
    uploads = [
        clients[c].update(SENT, ClientState(), round=r).upload.tensors["out.bias"] for c in (0, 1) for r in (1, 2)
    ]

    assert all(not torch.equal(a, b) for i, a in enumerate(uploads) for b in uploads[:i])


def test_the_global_random_state_and_threads_are_left_alone() -> None:
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()

    harness.clients(defense=harness.HEAD)[0].update(SENT, ClientState(), round=1)

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_the_streams_of_other_devices_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(seed: int) -> None:
        raise AssertionError("a client on the CPU seeds the GPUs")

    client = harness.clients(defense=harness.HEAD)[0]
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded)
    client.update(SENT, ClientState(), round=1)


def test_victims_are_disjoint_and_the_client_s_own() -> None:
    client = harness.clients()[2]

    batches = [client.victim_batch(k, 3).inputs for k in range(4)]

    own = client.examples.batch(client.indices).inputs
    found = [int((own == image).flatten(1).all(1).nonzero()) for batch in batches for image in batch]
    assert sorted(found) == list(range(harness.EXAMPLES_EACH))
    with pytest.raises(UserError, match="expected to hold 15 examples"):
        client.victim_batch(4, 3)


def test_a_probe_is_the_update_of_its_batch_and_changes_nothing() -> None:
    client = harness.clients(harness.FEDSGD, harness.HEAD)[0]
    state = ClientState()
    client.update(SENT, state, round=1)
    before = dict(state.tensors)

    probe = client.probe(SENT, state, round=2, probe=1, batch_size=2)

    harness.assert_same_tensors(state.tensors, before)
    assert probe.upload.num_examples == 2
    again = client.probe(SENT, state, round=2, probe=1, batch_size=2)
    harness.assert_same_tensors(probe.upload.tensors, again.upload.tensors)


def test_a_probe_has_its_own_batch_norm() -> None:
    for mode in ("eval", "train"):
        plan = replace(harness.FEDSGD, batch_norm="train", probe_batch_norm=mode)
        client = replace(harness.clients(plan)[0], defense=harness.Defense())
        probe = client.probe(SENT, ClientState(), round=2, probe=1, batch_size=2).upload
        expected = loss_gradients(client.model, SENT, client.victim_batch(1, 2), batch_norm=mode)
        torch.testing.assert_close(dict(probe.tensors), expected.gradients)
        torch.testing.assert_close(dict(probe.buffers), expected.buffers)
        trained = client.update(SENT, ClientState(), round=2).upload
        assert not torch.equal(trained.buffers["norm.running_mean"], SENT.buffers["norm.running_mean"])


def test_the_trained_batch_is_what_the_update_was_made_of() -> None:
    plain = {i: replace(p, defense=harness.Defense()) for i, p in harness.clients(harness.FEDSGD).items()}
    client = plain[0]

    batch = harness.replay(client, VictimId(3, 0)).examples

    model = harness.small_net()
    torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    update = client.update(SENT, ClientState(), round=3).upload
    assert update.num_examples == len(batch) == 8
    assert model.out.bias.grad is not None
    torch.testing.assert_close(update.tensors["out.bias"], model.out.bias.grad)


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (LocalPlan(), [10]),
        (LocalPlan(batch_size=4), [4]),
        (LocalPlan(batch_size=99), [10]),
        (LocalPlan(shares="delta", epochs=2, batch_size=4), [4, 4, 2, 4, 4, 2]),
        (LocalPlan(shares="delta", steps=5, batch_size=4), [4] * 5),
        (LocalPlan(shares="delta", steps=3), [10] * 3),
    ],
)
def test_batches_of_a_round(plan: LocalPlan, sizes: list[int]) -> None:
    batches = local_batches(10, plan, torch.Generator().manual_seed(0))

    assert [len(b) for b in batches] == sizes
    assert all(len(b.unique()) == len(b) for b in batches)
    if plan.epochs:
        assert sorted(torch.cat(batches[:3]).tolist()) == list(range(10))


def test_probes_are_dealt_in_turn() -> None:
    assert spread_probes(5, 2, {0: 5, 1: 1, 2: 9}) == (
        Probe(0, 0),
        Probe(0, 1),
        Probe(2, 0),
        Probe(2, 1),
        Probe(2, 2),
    )
    with pytest.raises(UserError, match="holds only 6 such batches"):
        spread_probes(7, 2, {0: 5, 1: 1, 2: 9})


@pytest.mark.parametrize(
    ("chosen", "rounds"),
    [("first", {1}), ("last", {9}), ("ends", {1, 9}), ("all", set(range(1, 10))), (3, {3}), ([2, 4], {2, 4})],
)
def test_rounds_by_name_or_number(chosen: object, rounds: set[int]) -> None:
    assert audited_rounds(chosen, 9) == rounds  # type: ignore[arg-type]


@pytest.mark.parametrize("chosen", ["middle", 0, 10, [1, 99]])
def test_rounds_that_do_not_exist_are_refused(chosen: object) -> None:
    with pytest.raises(UserError, match=r"intercept\.rounds is expected"):
        audited_rounds(chosen, 9)  # type: ignore[arg-type]


def test_an_audit_intercepts_updates_or_sends_probes() -> None:
    probes, updates = harness.probes(2), harness.updates(2, clients=(1,))

    assert (len(probes.probes_of(2)), probes.probes_of(1), probes.intercepts(2, 1)) == (4, (), False)
    assert (updates.probes_of(2), updates.intercepts(2, 1), updates.intercepts(2, 0), updates.intercepts(1, 1)) == (
        (),
        True,
        False,
        False,
    )
    assert Audit().probes_of(1) == ()
