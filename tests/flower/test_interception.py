"""An honest-but-curious server reads everything and changes nothing."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, Strategy

from fl_privacy.federation import Audit
from fl_privacy.federation.interception import Interceptor
from fl_privacy.flower import Federated, HonestButCurious, LocalGrid, simulated_client_app
from fl_privacy.flower.grids import FIRST_NODE
from fl_privacy.types import LocalPlan, ModelState, Observation, VictimId
from tests.federation import harness

ROUNDS = 2
WEIGHTS = LocalPlan(shares="weights", lr=0.1, epochs=1, batch_size=5, momentum=0.9)


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=harness.CLIENTS, min_available_nodes=harness.CLIENTS)


def fedadam() -> FedAdam:
    return FedAdam(fraction_evaluate=0.0, min_train_nodes=harness.CLIENTS, min_available_nodes=harness.CLIENTS)


def stock_client_app() -> ClientApp:
    """Build a client that knows nothing of this package: plain PyTorch, weights in, weights out."""
    app, data = ClientApp(), harness.examples()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = harness.small_net()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        batch = data.batch(torch.arange(context.node_config["partition-id"], len(data), harness.CLIENTS))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()
        metrics = MetricRecord({"num-examples": len(batch)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def start(strategy: Strategy, app: ClientApp, initial: ArrayRecord | None = None) -> dict[str, torch.Tensor]:
    random.seed(0)  # stock strategies draw the order of the nodes, hence of the sum, from it
    grid = LocalGrid(range(harness.CLIENTS), app)
    arrays = initial or ArrayRecord(harness.small_net().state_dict())
    result = strategy.start(grid, arrays, num_rounds=ROUNDS)
    assert result.arrays is not None
    return result.arrays.to_torch_state_dict()


def watched(strategy: Strategy, audit: Audit | None = None) -> tuple[HonestButCurious, list[Observation]]:
    recording = harness.Recording()
    return HonestButCurious(strategy, recording.interceptor(WEIGHTS), audit or harness.updates(1, 2)), (
        recording.observations
    )


@pytest.mark.parametrize("make", [fedavg, fedadam])
def test_training_is_the_same_with_and_without_it(make: Any) -> None:
    app = simulated_client_app(harness.clients(WEIGHTS))
    strategy, observations = watched(make())

    alone, together = start(make(), app), start(strategy, app)

    harness.assert_same_tensors(alone, together)
    assert len(observations) == ROUNDS * harness.CLIENTS


def test_stock_clients_are_read_exactly() -> None:
    strategy, observations = watched(fedavg())

    final = start(strategy, stock_client_app())

    observations.sort(key=lambda o: o.id)
    assert [o.id for o in observations] == [VictimId(r, c) for r in (1, 2) for c in range(harness.CLIENTS)]
    harness.assert_same_state(observations[0].sent, ModelState.of(harness.small_net()))
    mean = torch.stack([o.upload.tensors["out.weight"] for o in observations if o.id.round == 2]).mean(0)
    torch.testing.assert_close(mean, final["out.weight"])
    assert set(observations[0].upload.buffers) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    data = harness.examples()
    batch = data.batch(torch.arange(0, len(data), harness.CLIENTS))
    model = harness.small_net()
    torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    assert model.out.weight.grad is not None
    torch.testing.assert_close(observations[0].update()["out.weight"], -0.1 * model.out.weight.grad)


def test_arrays_without_names_get_those_of_the_model() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = ArrayRecord([np.asarray(a + 1) for a in message.content.array_records["arrays"].to_numpy_ndarrays()])
        return Message(RecordDict({"arrays": reply, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    strategy, observations = watched(fedavg())
    initial = ArrayRecord([t.numpy() for t in harness.small_net().state_dict().values()])

    start(strategy, app, initial)

    harness.assert_same_state(observations[0].sent, ModelState.of(harness.small_net()))
    torch.testing.assert_close(observations[0].update()["norm.weight"], torch.ones(3))


def test_only_the_rounds_and_clients_asked_for_are_kept() -> None:
    strategy, observations = watched(fedavg(), harness.updates(2, clients=(1,)))

    start(strategy, simulated_client_app(harness.clients(WEIGHTS)))

    assert [o.id for o in observations] == [VictimId(2, 1)]


def test_it_works_inside_another_wrapper() -> None:
    def wrapped(strategy: Strategy) -> Strategy:
        return DifferentialPrivacyServerSideFixedClipping(strategy, 1e-9, 1.0, harness.CLIENTS)

    strategy, observations = watched(fedavg())

    start(wrapped(strategy), simulated_client_app(harness.clients(WEIGHTS)))

    assert len(observations) == ROUNDS * harness.CLIENTS


def test_its_own_failure_is_logged_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    app = simulated_client_app(harness.clients(WEIGHTS))

    def broken(observation: Observation) -> None:
        raise OSError("no space left")

    interceptor = Interceptor(
        model=harness.small_net(), plan=WEIGHTS, input_shape=(1, 6, 6), num_classes=4, sink=broken
    )
    strategy = HonestButCurious(fedavg(), interceptor, harness.updates(1))

    together = start(strategy, app)

    harness.assert_same_tensors(start(fedavg(), app), together)
    assert caplog.text.count("could not be intercepted: OSError: no space left") == harness.CLIENTS


def test_a_reply_that_makes_no_sense_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Careless(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            return ArrayRecord(harness.small_net().state_dict()), None

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"config": ConfigRecord({"hello": "world"})}), reply_to=message)

    strategy, observations = watched(Careless(fraction_evaluate=0.0))

    start(strategy, app)

    assert not observations
    assert "expected to hold a finite num-examples" in caplog.text


def claiming(node: int, partition: int) -> LocalGrid:
    """Make a grid whose ``node`` replies to training and probes as if it held another ``partition``."""

    class Claiming(LocalGrid):
        def deliver(self, messages: Sequence[Message]) -> list[Message]:
            replies = super().deliver(messages)
            for reply in replies:
                if reply.metadata.src_node_id == node and not reply.metadata.message_type.startswith("query"):
                    reply.content["client"] = ConfigRecord({"partition-id": partition})
            return replies

    return Claiming(range(harness.CLIENTS), simulated_client_app(harness.clients(WEIGHTS)))


def test_nobody_passes_its_update_off_as_another_clients(caplog: pytest.LogCaptureFixture) -> None:
    strategy, observations = watched(fedavg())
    node = FIRST_NODE + 2

    strategy.start(claiming(node, 0), ArrayRecord(harness.small_net().state_dict()), num_rounds=ROUNDS)

    ids = [o.id for o in observations]
    assert len(ids) == len(set(ids)) == ROUNDS * (harness.CLIENTS - 1)
    assert "claims to be client 0" in caplog.text


def test_an_answer_to_a_probe_that_nobody_sent_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    audit = harness.probes(1)
    recording, server = harness.Recording(), harness.server()
    federated = Federated(server=server, audit=audit)
    strategy = HonestButCurious(federated, recording.interceptor(server.local_plan), audit)

    strategy.start(claiming(FIRST_NODE + 2, 999), federated.arrays(), num_rounds=1)

    assert {o.id.client for o in recording.observations} == {0, 1}
    assert "an answer to one of the probes sent is expected" in caplog.text
