"""A deployed client answers a round once, keeps its exact loss where it must, and reads what its operator says."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, MetricRecord, RecordDict, UserConfig

from fl_privacy.cli import flower_app
from fl_privacy.defenses import dp_noise, dp_sgd, pruning
from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.flower import PrivacyClient
from fl_privacy.flower._node_memory import SIMULATION_VARIABLE
from fl_privacy.flower.clients import DPClient
from fl_privacy.flower.records import read_result, state_records
from fl_privacy.rng import Secret, derive_generator
from fl_privacy.runs.config.untrusted import expect_no_place
from fl_privacy.types import ModelState
from tests.federation import harness

NOISE = dp_noise(clip_norm=1.0, scale=0.1)


def deployed(defense: Any = NOISE) -> Client:
    return replace(harness.clients(replace(harness.FEDAVG, batch_norm="eval"), defense)[0], seed=Secret.draw())


def question(client: PrivacyClient, round: int, **more: int) -> tuple[Any, dict[str, int]]:
    return client.get_parameters({}), {"server-round": round, **more}


def test_noise_is_not_averaged_away_by_asking_again() -> None:
    state = RecordDict()
    client = DPClient(deployed(), state, clip_norm=1.0, scale=0.1)
    client.fit(*question(client, 3))
    for round in (3, 2):
        with pytest.raises(UserError, match="answered before"):
            client.fit(*question(client, round))
    with pytest.raises(UserError, match="answered before"):  # another object of the same node, as Flower makes them
        DPClient(deployed(), state, clip_norm=1.0, scale=0.1).fit(*question(client, 3))
    client.fit(*question(client, 4))


def test_each_probe_is_answered_once_a_round() -> None:
    client = PrivacyClient(deployed(), RecordDict())
    client.probe(*question(client, 1, victim=0, **{"batch-size": 1}))
    client.probe(*question(client, 1, victim=1, **{"batch-size": 1}))
    with pytest.raises(UserError, match="answered before"):
        client.probe(*question(client, 1, victim=0, **{"batch-size": 1}))


def test_an_image_is_probed_once_a_round_in_whatever_batch() -> None:
    client = PrivacyClient(deployed(), RecordDict())
    client.probe(*question(client, 1, victim=1, **{"batch-size": 2}))  # images 2 and 3
    for victim, size in ((2, 1), (3, 1), (0, 4), (1, 3)):
        with pytest.raises(UserError, match="answered before"):
            client.probe(*question(client, 1, victim=victim, **{"batch-size": size}))
    for victim, size in ((-1, 1), (0, 0), (0, -3), (0, 2**40), (True, 1)):
        with pytest.raises(UserError, match=r"The (number|size) of a probe is expected"):
            client.probe(*question(client, 1, victim=victim, **{"batch-size": size}))
    client.probe(*question(client, 1, victim=1, **{"batch-size": 1}))


def test_a_simulation_may_ask_twice_and_hears_the_same() -> None:
    client = PrivacyClient(harness.clients(harness.FEDAVG, NOISE)[0])
    first, second = (client.fit(*question(client, 2))[0] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("defense", [NOISE, dp_sgd()])
def test_an_exact_loss_stays_with_a_client_that_promises_privacy(defense: Any) -> None:
    client = PrivacyClient(deployed(defense))
    _, _, metrics = client.fit(*question(client, 1))
    assert "train-loss" not in metrics
    assert metrics["train-loss-withheld"] == 1
    assert not any(key.endswith("seconds") for key in metrics), "a clock tells of examples too"
    with pytest.raises(UserError, match="promises differential privacy"):
        client.evaluate(*question(client, 1))


def test_exact_figures_do_not_leave_at_the_end_of_a_round_either() -> None:
    for defense, told in ((NOISE, set()), (pruning(rate=0.5), {"accuracy"})):
        client = PrivacyClient(deployed(defense), RecordDict())
        loss, number, metrics = client.personalize(*question(client, 1, test=1))
        assert metrics.keys() - {"seconds"} == told
        assert (loss, number) == (0.0, 0) if not told else loss > 0


def test_without_such_a_promise_the_loss_is_told() -> None:
    client = PrivacyClient(deployed(pruning()))
    told = client.fit(*question(client, 1))[2]
    assert told["train-loss"] > 0 and told["seconds"] > 0


def test_a_server_takes_a_reply_without_times_from_a_client_that_keeps_its_loss() -> None:
    sent = ModelState.of(deployed().model)
    records = {**state_records(sent), "metrics": MetricRecord({"num-examples": 2, "train-loss-withheld": 1})}
    result = read_result(RecordDict(records), sent)
    assert math.isnan(result.seconds) and math.isnan(result.defense_seconds)
    records["metrics"] = MetricRecord({"num-examples": 2, "train-loss": 1.0})
    with pytest.raises(UserError, match="seconds is expected"):
        read_result(RecordDict(records), sent)


def test_a_round_that_the_run_does_not_have_locks_nobody_out() -> None:
    client = PrivacyClient(deployed(), RecordDict())
    with pytest.raises(UserError, match="A round of 0 to inf is expected, but got -1; set last_round"):
        client.fit(*question(client, -1))
    client.last_round = 10
    with pytest.raises(UserError, match="0 to 10"):
        client.fit(*question(client, 10**9))
    client.fit(*question(client, 1))


def test_no_seed_is_a_secret_and_none_that_all_can_repeat() -> None:
    client = replace(harness.clients()[0], seed=None)
    assert isinstance(client.seed, Secret)
    for wrong in (None, "None", 1.5):
        with pytest.raises(TypeError, match="whole number or a Secret"):
            derive_generator(wrong, "client")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "override",
    [
        "data.root=/home/someone/pictures",
        "data.root=pictures",
        "defense.public=pictures",
        "defense.public=/etc",
        "weights=model.safetensors",
        "defense={evaluator: x, name: y}",
        "data.name=../elsewhere",
        'evaluator="~/e.safetensors"',
        "model.widths=[1,/tmp]",
    ],
)
def test_a_run_started_elsewhere_names_no_place_on_a_node(override: str) -> None:
    with pytest.raises(UserError, match="name no file or folder of a node"):
        expect_no_place(["data=mnist_mini", override], where="A run started elsewhere")


def test_what_names_no_place_passes() -> None:
    settings = ["data=mnist_mini", "model=lenet", "defense=dp_noise", "defense.scale=0.1", "out=/tmp/runs", "seed=1"]
    expect_no_place(settings, where="A run started elsewhere", unread={"out"})


def test_what_a_run_names_is_looked_at_before_any_of_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for a budget counts examples, so that data are loaded while the configuration is read."""
    monkeypatch.delenv(SIMULATION_VARIABLE, raising=False)
    monkeypatch.setattr(flower_app, "calibrated", lambda config: pytest.fail("it was built"))
    overrides = "data=image_folder data.root=/home/someone defense=dp_sgd privacy.epsilon=5"
    config = {"partition-id": 0, "num-partitions": 2}
    context = Context(1, 1, UserConfig(config), RecordDict(), UserConfig({"overrides": overrides}))
    with pytest.raises(UserError, match=r"sets data\.root"):
        flower_app.make_client(context)


def test_an_order_is_short_before_it_is_parsed() -> None:
    overrides = f"data.classes=[{','.join(f'c{k}' for k in range(50_000))}]"
    context = Context(1, 1, UserConfig({"partition-id": 0}), RecordDict(), UserConfig({"overrides": overrides}))
    with pytest.raises(UserError, match="At most 16384 letters") as caught:
        flower_app.make_client(context)
    assert len(str(caught.value)) < 200
