"""Clients as Flower sees them, and a defense around a client of somebody else."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.common import FitIns, Status, ndarrays_to_parameters, parameters_to_ndarrays

from fl_privacy.defenses import ClientState, Defense, dp_noise, pruning
from fl_privacy.errors import UserError
from fl_privacy.flower import (
    ATSClient,
    DPClient,
    LocalGrid,
    PrivacyClient,
    PruningClient,
    SPNClient,
    defend,
    numpy_client_app,
)
from fl_privacy.flower.records import load_state
from fl_privacy.types import LocalPlan, ModelState
from tests.federation import harness

WEIGHTS = LocalPlan(shares="weights", lr=0.1, epochs=1, batch_size=5)
NONE = Defense()


def simulated(plan: LocalPlan = harness.FEDAVG, defense: Defense = NONE) -> Any:
    return harness.clients(plan, defense)[0]


def test_fit_is_the_update_of_the_client() -> None:
    client = PrivacyClient(simulated())

    arrays, num_examples, metrics = client.fit(client.get_parameters({}), {"server-round": 1})

    expected = simulated().update(ModelState.of(harness.small_net()), ClientState(), round=1).upload
    assert num_examples == expected.num_examples
    actual = dict(zip(json.loads(str(metrics["names"])), arrays, strict=True))
    assert actual.keys() == {*expected.tensors, *expected.buffers}
    for name, tensor in {**expected.tensors, **expected.buffers}.items():
        assert np.array_equal(actual[name], tensor.numpy()), name


def test_evaluate_is_of_the_client_s_own_examples() -> None:
    client = PrivacyClient(simulated())

    loss, number, metrics = client.evaluate(client.get_parameters({}), {})

    model, data = harness.small_net().eval(), harness.examples()
    batch = data.batch(torch.arange(0, len(data), harness.CLIENTS))
    logits = model(batch.inputs).detach()
    assert number == len(batch)
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, batch.labels)), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == batch.labels).float().mean()))


def test_the_legacy_interface_of_flower_works_too() -> None:
    client = PrivacyClient(simulated(WEIGHTS)).to_client()
    parameters = ndarrays_to_parameters(PrivacyClient(simulated()).get_parameters({}))

    reply = client.fit(FitIns(parameters, {"server-round": 1}))

    assert isinstance(reply.status, Status)
    assert len(parameters_to_ndarrays(reply.parameters)) == len(harness.small_net().state_dict())


def test_a_subclass_is_its_defense() -> None:
    noisy = DPClient(simulated(), scale=0.5, clip_norm=1.0)
    sparse = PruningClient(simulated(), rate=0.75)

    assert noisy.wrapped.defense.parts[0].settings == dp_noise(scale=0.5, clip_norm=1.0).parts[0].settings
    arrays, _, metrics = sparse.fit(sparse.get_parameters({}), {"server-round": 1})
    update = dict(zip(json.loads(str(metrics["names"])), arrays, strict=True))
    assert (update["out.weight"] == 0).mean() == 0.75


def test_a_private_head_survives_in_the_client_s_memory_alone() -> None:
    memory = RecordDict()
    client = SPNClient(simulated(), memory, alpha2=0.5, bits=8)
    arrays, _, metrics = client.fit(client.get_parameters({}), {"server-round": 1})
    first = load_state(memory).tensors
    client.fit(client.get_parameters({}), {"server-round": 2})
    second = load_state(memory).tensors

    assert "out.weight" in json.loads(str(metrics["names"])) and len(arrays) == len(client.get_parameters({}))
    assert "spn" not in str(metrics)
    assert first.keys() == {f"private/out.spn.{name}" for name in ("weight", "bias", "codes")}
    assert torch.equal(first["private/out.spn.codes"], second["private/out.spn.codes"])
    assert not torch.equal(first["private/out.spn.weight"], second["private/out.spn.weight"])


def test_a_client_behind_transformations_uploads_another_update() -> None:
    plain, hidden = PrivacyClient(simulated()), ATSClient(simulated(), policies="0")
    uploads = [client.fit(client.get_parameters({}), {"server-round": 1})[0] for client in (plain, hidden)]
    assert hidden.wrapped.defense.name == "ats"
    assert any(not np.array_equal(one, other) for one, other in zip(*uploads, strict=True))


def test_settings_without_a_defense_are_refused() -> None:
    with pytest.raises(UserError, match="expected to get no settings, but got scale"):
        PrivacyClient(simulated(), scale=0.5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "'server-round'"),
        ({"server-round": "one"}, "'server-round'"),
        ({"names": "[]", "server-round": 1}, "0 arrays"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    client = PrivacyClient(simulated())
    with pytest.raises(UserError, match=message):
        client.fit(client.get_parameters({}), config)


FIRST: Any = {"server-round": 1}


class Doubler(NumPyClient):
    """Somebody's client: weights in, weights out."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def get_parameters(self, config: Any) -> list[np.ndarray]:
        return [np.ones((2, 3), dtype=np.float32), np.ones(4, dtype=np.float32), np.array(5)]

    def fit(self, parameters: list[np.ndarray], config: Any) -> Any:
        return [(a * self.factor).astype(a.dtype) for a in parameters], 7, {"mood": "good"}

    def evaluate(self, parameters: list[np.ndarray], config: Any) -> Any:
        return 0.5, 7, {"accuracy": 0.25}


def halve(update: Any, state: ClientState, rng: torch.Generator) -> Any:
    return {name: t / 2 for name, t in update.items()}


def test_hooks_see_the_change_of_the_weights() -> None:
    seen = {}

    def look(update: Any, state: ClientState, rng: torch.Generator) -> Any:
        seen.update(update)
        return update

    client = defend(Doubler(3.0), Defense(upload=(look, halve)))
    arrays, number, metrics = client.fit(Doubler().get_parameters({}), {"server-round": 1})

    assert {name: t.unique().tolist() for name, t in seen.items()} == {"0": [2.0], "1": [2.0]}
    assert [a.ravel()[0] for a in arrays] == [2.0, 2.0, 5]
    assert [a.dtype for a in arrays] == [np.float32, np.float32, np.int64]
    assert (number, metrics) == (7, {"mood": "good"})
    assert client.evaluate(arrays, {"server-round": 1}) == (0.5, 7, {"accuracy": 0.25})


def test_a_withheld_name_comes_back_as_it_was_sent() -> None:
    def withhold(update: Any, state: ClientState, rng: torch.Generator) -> Any:
        return {"head": update["head"]}

    client = defend(Doubler(), Defense(upload=(withhold,)), names=["body", "head", "count"])
    arrays, _, _ = client.fit(Doubler().get_parameters({}), {"server-round": 1})

    assert [a.ravel()[0] for a in arrays] == [1.0, 2.0, 5]


def test_a_class_is_defended_too() -> None:
    make = defend(Doubler, Defense(upload=(halve,)))

    arrays, _, _ = make(factor=5.0).fit(Doubler().get_parameters({}), {"server-round": 1})

    assert [a.ravel()[0] for a in arrays] == [3.0, 3.0, 5]


def test_the_noise_is_that_of_a_client_of_this_package() -> None:
    noise = Defense(upload=(harness.with_noise,))
    ours = PrivacyClient(simulated(WEIGHTS, noise))
    theirs = defend(PrivacyClient(simulated(WEIGHTS)), noise, seed=11, number=0)
    names = json.dumps([n for n, _ in harness.small_net().named_parameters()])
    weights = [p.detach().numpy() for p in harness.small_net().parameters()]
    config: Any = {"server-round": 3, "names": names}

    for mine, other in zip(ours.fit(weights, config)[0], theirs.fit(weights, config)[0], strict=False):
        assert np.allclose(mine, other, atol=1e-6)


def test_no_parameters_leave_a_defended_client_beside_its_defense() -> None:
    """A client that keeps its network, as Flower's first apps do, would answer with its trained weights."""
    kept = Doubler()
    with pytest.raises(UserError, match="asked for no parameters"):
        defend(kept, dp_noise(scale=1.0), names=["weight", "bias", "count"]).get_parameters({})
    assert defend(kept, NONE, seed=1).get_parameters({}), "a simulation may"


def test_noise_without_a_seed_never_repeats() -> None:
    client = defend(Doubler(), dp_noise(scale=1.0), names=["weight", "bias", "norm.num_batches_tracked"])
    first, second = (client.fit(Doubler().get_parameters({}), {"server-round": k})[0][0] for k in (1, 2))

    assert not np.array_equal(first, second)


class Measuring(Doubler):
    """States figures in NumPy's own kinds of numbers, as metrics that are computed by it are."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, np.int64(7), {"loss": np.float32(0.5)}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return np.float32(0.123456), np.int64(7), {"accuracy": np.float32(0.98765), "right": np.int64(5)}


def test_figures_in_numpy_s_numbers_leave_and_are_rounded_alike() -> None:
    client = defend(Measuring(), pruning(rate=0.5), memory=RecordDict())

    assert client.fit(Doubler().get_parameters({}), FIRST)[1:] == (7, {"loss": 0.5})
    assert client.evaluate(Doubler().get_parameters({}), FIRST) == (0.123, 7, {"accuracy": 0.988, "right": 5})


def test_hooks_remember_in_the_context() -> None:
    memory = RecordDict()
    factors = []
    for round in (1, 2):
        client = defend(Doubler(), Defense(upload=(harness.with_memory,)), memory=memory)
        factors.append(client.fit(Doubler().get_parameters({}), {"server-round": round})[0][0].ravel()[0])

    assert factors == pytest.approx([2.1, 2.2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: defend(Doubler(), harness.HEAD), "expected to act on the upload only, but head"),
        (lambda: defend(Doubler(), pruning(by="weight")), "acts within the training"),
        (lambda: defend(Doubler(), NONE, names=["a"]).fit(Doubler().get_parameters({}), FIRST), "3 names are expected"),
        (lambda: defend(Doubler(), NONE, seed=1).fit(Doubler().get_parameters({}), {}), "'server-round'"),
        (
            lambda: defend(Doubler(), NONE).fit(Doubler().get_parameters({}), {"server-round": -1}),
            "A round of 0 to inf is expected, but got -1; set rounds=",
        ),
        (
            lambda: defend(Shrinking(), NONE, seed=1).fit(Doubler().get_parameters({}), FIRST),
            "Shrinking.fit is expected",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


class Shrinking(NumPyClient):
    def fit(self, parameters: list[np.ndarray], config: Any) -> Any:
        return [a.ravel()[:1] for a in parameters], 1, {}


def ask(make_client: Any, kind: str, content: RecordDict, *, audited: bool = False) -> Message:
    grid = LocalGrid(range(2), numpy_client_app(make_client, audited=audited))
    (reply,) = grid.send_and_receive([Message(content, grid.get_node_ids()[1], kind)])
    return reply


def stock_content(client: NumPyClient) -> RecordDict:
    arrays = ArrayRecord(client.get_parameters({}))
    return RecordDict({"weights": arrays, "options": ConfigRecord({"server-round": 1, "rates": [0.1, 0.2]})})


def test_the_adapter_answers_in_the_layout_of_the_request() -> None:
    content = stock_content(Doubler())

    reply = ask(lambda context: Doubler(), "train", content).content

    assert list(reply.array_records) == ["weights"]
    assert list(reply.array_records["weights"]) == ["0", "1", "2"]
    assert reply.metric_records["metrics"] == {"num-examples": 7}
    assert reply.config_records["client"] == {"partition-id": 1, "num-partitions": 2}


def test_the_adapter_evaluates() -> None:
    reply = ask(lambda context: Doubler(), "evaluate", stock_content(Doubler())).content

    assert reply.metric_records["metrics"] == {"num-examples": 7, "loss": 0.5, "accuracy": 0.25}


def test_a_client_of_deltas_does_not_join_a_stock_strategy() -> None:
    def make(context: Context) -> PrivacyClient:
        return PrivacyClient(simulated())

    reply = ask(make, "train", stock_content(PrivacyClient(simulated())))

    assert "this client's plan shares its delta" in str(reply.error.reason)


def test_a_foreign_client_can_not_be_probed() -> None:
    reply = ask(lambda context: Doubler(), "train.probe", stock_content(Doubler()), audited=True)

    assert "expected to be a PrivacyClient, but is a Doubler" in str(reply.error.reason)
