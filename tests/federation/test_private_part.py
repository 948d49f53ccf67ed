"""A private part of the model: it stays with each client, trains there, and an empty one changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.attacks.feature_inversion import InversionProblem, ModelInversion
from fl_privacy.defenses import ClientState, Defense, compose, dp_noise, fdl_pp, none, split_fed
from fl_privacy.effects import Part
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Client, Server, plain_rounds, private_names, public_state
from fl_privacy.federation.interception.interceptor import SimulatedSideInformation
from fl_privacy.flower import LocalGrid, rounds_in_process, rounds_on_grid, simulated_client_app
from fl_privacy.models import Front, cut_layer
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors, VictimId
from tests.federation import harness

ROUNDS = 2
CONV = ["conv"]


def clients_of(defense: Defense, plan: LocalPlan = harness.FEDAVG) -> dict[int, Client]:
    test = harness.examples(8, seed=6)
    return {i: replace(p, test=test) for i, p in harness.clients(plan, defense).items()}


def server(defense: Defense, plan: LocalPlan = harness.FEDAVG) -> Server:
    model = harness.small_net()
    return replace(
        harness.server(plan),
        state=public_state(model, defense),
        personal=bool(private_names(model, defense)),
        tested=frozenset({ROUNDS}),
    )


def run(
    defense: Defense,
    backend: Any = plain_rounds,
    plan: LocalPlan = harness.FEDAVG,
    audit: Audit | None = None,
    **insider: Any,
) -> Any:
    federation, recording = server(defense, plan), harness.Recording()
    interceptor = recording.interceptor(plan)
    if insider:
        inside = SimulatedSideInformation(clients=clients_of(defense, plan), batch_size=2, **insider)
        interceptor = replace(interceptor, side_information=inside)
    source = partial(clients_of, defense, plan)
    audit = audit or harness.probes(1, 2)
    kept = recording.through(backend, federation, source, rounds=ROUNDS, audit=audit, interceptor=interceptor)
    return federation.state, recording, kept


DEFENSES = {
    "split": split_fed(private=CONV),
    "split, shared start": split_fed(private=CONV, start="shared"),
    "passport": fdl_pp(private=CONV),
    "passport, penalized": fdl_pp(private=CONV, form="penalized"),
    "passport instead of batch norm": fdl_pp(private=["conv", "norm"]),
}
every_split = pytest.mark.parametrize("defense", DEFENSES.values(), ids=DEFENSES.keys())
every_name = pytest.mark.parametrize("name", DEFENSES)


@cache
def seen_inside(name: str, backend: Any) -> Any:
    """Run a defense beside a client that colludes and knows features."""
    return run(DEFENSES[name], backend, colluder=2, knows_features=True)


@pytest.mark.parametrize("plan", [harness.FEDAVG, harness.FEDSGD], ids=["fedavg", "fedsgd"])
def test_an_empty_private_part_is_federated_averaging_bit_for_bit(plan: LocalPlan) -> None:
    split, seen, kept = run(split_fed(private=[]), plan=plan)
    plain, expected, _ = run(none(), plan=plan)

    harness.assert_same_state(split, plain)
    harness.assert_same_observations(seen.observations, expected.observations)
    assert all(not state.tensors for state in kept.values())


@every_name
def test_the_private_part_is_neither_sent_nor_uploaded(name: str) -> None:
    defense, (state, recording, kept) = DEFENSES[name], seen_inside(name, plain_rounds)

    names = {name for name, _ in harness.small_net().named_parameters()} - private_names(harness.small_net(), defense)
    assert set(state.parameters) == names
    for observation in recording.observations:
        assert set(observation.sent.parameters) == set(observation.upload.tensors) == names
    assert all("private/conv.weight" in own.tensors for own in kept.values())


@every_name
def test_public_layers_are_the_same_on_all_clients_private_ones_are_not(name: str) -> None:
    _, recording, kept = seen_inside(name, rounds_in_process)

    for round in range(1, ROUNDS + 1):
        first, *others = (o for o in recording.observations if o.id.round == round)
        assert {o.id.client for o in others} >= {1, 2}
        for other in others:
            harness.assert_same_state(first.sent, other.sent)
    held = kept[0].tensors
    for tensor in held:
        assert tensor.startswith("private/")
        if held[tensor].is_floating_point():
            assert not torch.equal(held[tensor], kept[1].tensors[tensor]), tensor


@every_name
def test_flower_gives_the_bits_of_the_plain_loop(name: str) -> None:
    state, expected, kept = seen_inside(name, plain_rounds)
    other, actual, other_kept = seen_inside(name, rounds_in_process)

    harness.assert_same_state(state, other)
    harness.assert_same_observations(expected.observations, actual.observations)
    assert [r.evaluation for r in expected.reports] == [r.evaluation for r in actual.reports]
    for client, own in kept.items():
        harness.assert_same_tensors(own.tensors, other_kept[client].tensors)
    for one, two in zip(expected.observations, actual.observations, strict=True):
        harness.assert_same_tensors({"f": one.knowledge.features}, {"f": two.knowledge.features})
        harness.assert_same_state(one.knowledge.private, two.knowledge.private)


@pytest.mark.parametrize("defense", [none(), split_fed(private=CONV, start="shared")])
def test_features_of_trained_models_are_those_of_what_each_client_holds_after_its_training(defense: Defense) -> None:
    plan = harness.FEDAVG
    _, recording, _ = run(defense, plan=plan, colluder=2, knows_features=True, features_of="trained")
    clients = clients_of(defense, plan)

    seen = next(o for o in recording.observations if o.id.round == 1)

    for client, held in ((seen.id.client, None), (2, seen.knowledge.front)):
        state = ClientState()
        upload = clients[client].update(seen.sent, state, round=1).upload
        public = {name: seen.sent.parameters[name] + change for name, change in upload.tensors.items()}
        private = clients[client].private_part(seen.sent, state)[1]
        values = ModelState(
            {**public, **private.parameters}, {**seen.sent.buffers, **upload.buffers, **private.buffers}
        )
        if held is not None:
            harness.assert_same_state(held, values)
            continue
        model, _ = clients[client].private_part(seen.sent, state)
        front = Front(model, cut_layer(model, seen.input_shape, seen.sent.parameters)).eval()
        examples = clients[client].victim_batch(seen.id.probe, 2).inputs
        model.load_state_dict({**values.parameters, **values.buffers}, strict=False)
        torch.testing.assert_close(front(examples), seen.knowledge.features)
    assert "after local training" in " ".join(seen.knowledge.describe())


def test_a_module_that_shows_nothing_is_refused_before_a_training() -> None:
    with pytest.raises(UserError, match=r"features_at is expected to be one of activation, .*, but got 'features.99'"):
        run(none(), colluder=2, knows_features=True, features_at="features.99")
    with pytest.raises(UserError, match="features_of=trained expects a client"):
        run(none(), colluder=None, knows_features=True, features_of="trained")


class _Listening(LocalGrid):
    """A grid that keeps the bytes of every message."""

    traffic: list[bytes]

    def deliver(self, messages: Any) -> list[Message]:
        replies = super().deliver(messages)
        for message in [*messages, *replies]:
            self.traffic += [a.data for r in message.content.array_records.values() for a in r.values()]
            self.traffic.append(repr([*message.content.metric_records.items()]).encode())
            self.traffic.append(repr([*message.content.config_records.items()]).encode())
        return replies


@every_split
def test_no_private_byte_is_in_a_message(defense: Defense) -> None:
    federation, recording = server(defense), harness.Recording()
    grid = _Listening(federation.clients, simulated_client_app(clients_of(defense)))
    grid.traffic = []

    recording.follow(
        rounds_on_grid(
            grid,
            federation,
            rounds=ROUNDS,
            audit=harness.probes(1, 2),
            interceptor=recording.interceptor(),
        )
    )

    traffic = b"".join(grid.traffic)
    public = federation.state.parameters["out.weight"].numpy().tobytes()
    assert len(traffic) > 10 * len(public)
    for client in federation.clients:
        held = grid.contexts[1000 + client].state.array_records["fl-privacy"]
        for name, array in held.items():
            values = array.numpy()
            pieces = [v.tobytes() for v in values.reshape(-1, values.shape[-1])] if values.ndim else []
            assert not any(piece in traffic for piece in pieces if len(piece) >= 8), name


def test_accuracy_is_the_mean_over_the_clients_own_models() -> None:
    defense = split_fed(private=CONV)
    state, recording, kept = run(defense)

    correct = []
    test = harness.examples(8, seed=6).batch(torch.arange(8))
    for own in kept.values():
        private = {n.removeprefix("private/"): t for n, t in own.tensors.items()}
        values = {**state.parameters, **state.buffers, **private}
        logits = functional_call(harness.small_net().eval(), values, (test.inputs,))
        correct.append((logits.argmax(1) == test.labels).float().mean().item())
    assert recording.reports[0].evaluation is None
    assert recording.reports[-1].evaluation.accuracy == pytest.approx(sum(correct) / len(correct))


def test_the_second_phase_trains_the_private_part_alone_by_plain_descent() -> None:
    defense, plan = split_fed(private=CONV), LocalPlan(shares="delta", lr=0.1, lr_decay=0.5, epochs=1)
    client, sent, state = clients_of(defense, plan)[0], server(defense).state, ClientState()
    client.update(sent, state, round=2)
    before = dict(state.tensors)
    untouched = {n: p.clone() for n, p in sent.parameters.items()}

    client.personalize(sent, state, round=2, test=False)

    model, batch = harness.small_net().train(), client.examples.batch(client.indices)
    values = {n: t.clone().requires_grad_() for n, t in before.items()}
    full = {**sent.parameters, **sent.buffers, **{n.removeprefix("private/"): v for n, v in values.items()}}
    loss = torch.nn.functional.cross_entropy(functional_call(model, full, (batch.inputs,)), batch.labels)
    for (name, value), gradient in zip(values.items(), torch.autograd.grad(loss, list(values.values())), strict=True):
        torch.testing.assert_close(state.tensors[name], value.detach() - 0.05 * gradient, rtol=1e-4, atol=1e-6)
    harness.assert_same_tensors(sent.parameters, untouched)


def test_the_second_phase_descends_the_changed_loss() -> None:
    @contextmanager
    def twice(model: nn.Module, values: Tensors, batch: Batch) -> Iterator[Callable[[Tensor], Tensor]]:
        assert "out.weight" in values
        yield lambda loss: 2 * loss

    split = split_fed(private=CONV)
    ends = []
    for defense, lr in ((split, 0.2), (compose(split, Defense(parts=(Part("twice"),), loss=(twice,))), 0.1)):
        client, state = clients_of(defense, LocalPlan(shares="delta", lr=lr))[0], ClientState()
        client.personalize(server(defense).state, state, round=1, test=False)
        ends.append(state.tensors)

    torch.testing.assert_close(*ends)


def test_the_penalty_moves_what_clients_keep() -> None:
    loose, tied = (run(fdl_pp(private=CONV, form="penalized", penalty=p))[2][0].tensors for p in (1e-3, 1.0))

    moved = {name for name in loose if not torch.equal(loose[name], tied[name])}
    assert {"private/conv.gamma", "private/conv.beta", "private/conv.encoder.weight"} <= moved


def test_a_colluding_client_gives_its_own_layers_away_and_nobody_else_s() -> None:
    defense = fdl_pp(private=CONV)
    _, recording, _ = run(defense, colluder=2, knows_features=False)

    clients = clients_of(defense)
    for observation in (o for o in recording.observations if o.id.round == 1):
        _, own = clients[2].private_part(observation.sent, ClientState())
        harness.assert_same_state(observation.knowledge.private, own)
        assert observation.knowledge.features is None
        assert "Client 2 colludes" in " ".join(observation.knowledge.describe())


def test_without_a_colluder_the_attacker_has_a_draw_of_its_own() -> None:
    _, recording, kept = run(split_fed(private=CONV), colluder=None, knows_features=False)

    stand_in = recording.observations[0].knowledge.private.parameters["conv.weight"]
    assert all(not torch.equal(stand_in, own.tensors["private/conv.weight"]) for own in kept.values())
    initial = harness.small_net().conv.weight  # what clients begin with where start=shared
    assert not torch.equal(stand_in, initial)
    assert sorted(stand_in.flatten().tolist()) == sorted(initial.flatten().tolist())


def test_splits_compose() -> None:
    state, _, kept = run(
        Defense(parts=(Part("x"),), private=split_fed(private=CONV).private, upload=dp_noise(scale=0.1).upload)
    )

    assert "conv.weight" not in state.parameters
    assert isinstance(state, ModelState)
    assert "private/conv.weight" in kept[0].tensors


@pytest.mark.parametrize(
    ("private", "message"), [(["cnov"], "such as|use some of conv, norm, out"), (["conv", "norm", "out"], "name fewer")]
)
def test_wrong_modules_are_refused(private: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        private_names(harness.small_net(), split_fed(private=private))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_features_are_those_behind_the_victim_s_gradient_with_a_private_norm(mode: Literal["train", "eval"]) -> None:
    plan = replace(harness.FEDAVG, probe_batch_norm=mode)
    defense = split_fed(private=["conv", "norm"])
    _, recording, _ = run(defense, plan=plan, colluder=0, knows_features=True)

    told = [o for o in recording.observations if (o.id.round, o.id.client) == (2, 0)]
    assert told
    for observation in told:
        images = clients_of(defense, plan)[0].victim_batch(observation.id.probe, 2).inputs
        device = torch.device("cpu")
        model = frozen_copy(
            observation.model, observation.assumed(), observation.plan, device=device, dtype=torch.float32
        )
        problem = InversionProblem(
            attack=ModelInversion(priors=(), anchor=0.0),
            front=Front(model, "out"),
            features=observation.knowledge.features[None],
            shape=tuple(images.shape),
            unknown={},
        )
        assert float(problem.loss(images[None].flatten(1))) < 1e-9
    seen = [o for o in recording.observations if o.id.round == 1]
    assert all((o.knowledge.private.buffers["norm.num_batches_tracked"] == 0).all() for o in seen)


@pytest.mark.parametrize("backend", [plain_rounds, rounds_in_process])
def test_an_update_is_captured_beside_what_the_client_held_before_it(backend: Any) -> None:
    defense = split_fed(private=CONV)
    _, recording, _ = run(defense, backend, audit=harness.updates(1), colluder=2, knows_features=True)

    clients = clients_of(defense)
    assert [o.id for o in recording.observations] == [VictimId(1, i) for i in range(3)]
    for client, observation in enumerate(recording.observations):
        _, expected = clients[2].private_part(observation.sent, ClientState())
        harness.assert_same_state(observation.knowledge.private, expected)
        _, own = clients[client].private_part(observation.sent, ClientState())
        images = harness.replay(clients[client], VictimId(1, client)).examples.inputs
        features = torch.nn.functional.conv2d(
            images, own.parameters["conv.weight"], own.parameters["conv.bias"], padding=1
        )
        torch.testing.assert_close(observation.knowledge.features, features)


@pytest.mark.parametrize("backend", [plain_rounds, rounds_in_process])
def test_features_are_those_of_the_images_that_the_client_trained_on(backend: Any) -> None:
    plan = replace(harness.FEDAVG, crop_padding=2, flip=True)
    inverted = Defense(data=(lambda batch, state, rng: Batch(1 - batch.inputs, batch.labels),))
    defense = compose(split_fed(private=CONV), inverted)
    _, recording, kept = run(defense, backend, plan, harness.updates(1), colluder=2, knows_features=True)

    client, observation = clients_of(defense, plan)[0], recording.observations[0]
    replay = harness.replay(client, observation.id)
    _, own = client.private_part(observation.sent, ClientState())
    features = [
        torch.nn.functional.conv2d(batch.inputs, own.parameters["conv.weight"], own.parameters["conv.bias"], padding=1)
        for batch in (replay.transformed, replay.examples)
    ]
    torch.testing.assert_close(observation.knowledge.features, features[0])
    assert not torch.allclose(features[0], features[1])
    unwatched = run(defense, backend, plan)[2]
    for client_id, own in kept.items():
        harness.assert_same_tensors(own.tensors, unwatched[client_id].tensors)
