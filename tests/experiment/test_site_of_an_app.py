"""What another site computes of an app's replies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import ndarrays_to_parameters
from flwr.server import strategy as legacy
from flwr.serverapp import strategy as flower
from torch import Tensor

from fl_privacy.auditing import scenario_final
from fl_privacy.auditing.instrument.matching import Matched
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.auditing.scenario_final import of_final_model
from fl_privacy.auditing.scenario_problem import NotAttackedError, WatchedReply, seen_by_site
from fl_privacy.auditing.scenarios import Scenarios
from fl_privacy.auditing.server_step import NOISED, OTHER_RULES, PLAIN_MEAN, server_plan_of
from fl_privacy.federation.another_site import AnotherSite
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.types import LocalPlan, ModelState, Upload

BEFORE = torch.linspace(-1, 1, 50)


def reply(change: float, shares: str) -> WatchedReply:
    moved = change * torch.linspace(1, 2, 50)
    array = (BEFORE + moved if shares == "weights" else moved).numpy()
    watched: Any = SimpleNamespace(before={"w": BEFORE})
    return WatchedReply(
        reply={"arrays/w": array}, watched=watched, matched=Matched(parameters={"arrays/w": "w"}, shares=shares)
    )


@pytest.mark.parametrize("shares", ["weights", "delta", "gradient"])
@pytest.mark.parametrize("others", [1, 4])
def test_the_others_mean_reply_is_left_up_to_rounding(shares: str, others: int) -> None:
    again, own = reply(0.01, shares), reply(-0.03, shares)
    found, truth = seen_by_site(again, own, others, PLAIN_MEAN).tensors()["w"], again.tensors()["w"]
    wrong = (found - truth).abs().max()
    assert 0 < float(wrong) < 1e-6 * (1 + 1 / others)


def test_a_federation_of_one_has_no_other_site() -> None:
    ladder = Scenarios(clients=(), attack=None, sites=1)  # type: ignore[arg-type]
    answer = ladder._of_site([], "")
    assert answer.counts is None
    assert "no other site" in answer.reason


def test_arrays_of_a_reply_stay_as_they_are() -> None:
    again = reply(0.01, "weights")
    kept = again.reply["arrays/w"].copy()
    seen_by_site(again, reply(0.5, "weights"), 1, PLAIN_MEAN)
    assert np.array_equal(again.reply["arrays/w"], kept)


def aggregated(strategy: Any, sent: np.ndarray, moved: list[np.ndarray]) -> np.ndarray:
    """Return the model that Flower's ``strategy`` makes of replies in round 1."""
    adaptive = isinstance(strategy, flower.FedAdagrad | flower.FedAdam | flower.FedYogi)
    strategy.current_arrays = {"w": sent} if adaptive else ArrayRecord({"w": Array(sent)})
    identify_process()
    replies = []
    for node, values in enumerate(moved):
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord({"w": Array(values)}), "metrics": metrics})
        asked = Message(content=RecordDict(), dst_node_id=node + 1, message_type="train")
        replies.append(Message(content, reply_to=asked))
    arrays, _ = strategy.aggregate_train(1, replies)
    return np.asarray(arrays["w"].numpy())


@pytest.mark.parametrize(
    "strategy",
    [
        flower.FedAvg(),
        flower.FedProx(proximal_mu=0.1),
        flower.FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
        flower.FedAdam(),
        flower.FedYogi(eta=0.3),
        flower.FedAdagrad(),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_the_rule_of_a_flower_strategy_is_undone_on_its_own_model(strategy: Any) -> None:
    rng = np.random.default_rng(0)
    sent, *changes = (rng.normal(scale=scale, size=500).astype(np.float32) for scale in (0.1, 1e-3, 1e-3))
    after = aggregated(strategy, sent, [sent + change for change in changes])
    plan = server_plan_of(strategy)
    assert not isinstance(plan, str)
    states = (ModelState({"w": torch.from_numpy(np.asarray(values, np.float32))}) for values in (sent, after))
    own = Upload(tensors={"w": torch.from_numpy(changes[1])}, num_examples=1)
    found = AnotherSite(plan=plan, local_plan=LocalPlan(shares="delta")).rest(*states, {1: own}, {0: 1, 1: 1})
    assert found is not None
    truth = torch.from_numpy(changes[0])
    assert float((found.tensors["w"] - truth).norm() / truth.norm()) < 1e-3


@pytest.mark.parametrize("name", [name for name in OTHER_RULES if name in vars(flower)])
def test_a_strategy_that_takes_no_mean_is_not_taken_for_one(name: str) -> None:
    known = {"num_malicious_nodes": 1} if name in ("Krum", "MultiKrum", "Bulyan") else {}
    known = {"client_learning_rate": 0.1} if name == "QFedAvg" else known
    plan = server_plan_of(getattr(flower, name)(**known))
    assert isinstance(plan, str) and name in plan
    scenarios = Scenarios(clients=(), attack=None, sites=4, server=plan)  # type: ignore[arg-type]
    answer = scenarios._of_site([], "")
    assert answer.counts is None and answer.reason == plan
    assert {one.reason for one in of_final_model([], [], None, [], 1.0, server=plan)} == {plan}


def test_the_strategy_within_a_server_counts() -> None:
    within = SimpleNamespace(strategy=SimpleNamespace(strategy=flower.FedMedian()))
    assert "median" in str(server_plan_of(within))
    older = legacy.FedAdam(initial_parameters=ndarrays_to_parameters([np.zeros(2)]), eta=0.1)
    plan = server_plan_of(SimpleNamespace(strategy=older))
    assert not isinstance(plan, str) and plan.optimizer.name == "adam"
    assert server_plan_of(None) == server_plan_of(flower.FedAvgM()) == PLAIN_MEAN
    assert "not understood" in str(server_plan_of(flower.FedAdam(tau=0.0)))


@pytest.mark.parametrize(
    "strategy",
    [
        flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 1.0, 1.0, 2),
        flower.DifferentialPrivacyClientSideAdaptiveClipping(flower.FedAvg(), 1.0, 40),
        legacy.DifferentialPrivacyServerSideFixedClipping(legacy.FedAvg(), 1.0, 1.0, 2),
        legacy.DPFedAvgFixed(legacy.FedAvg(), 2, 1.0, server_side_noising=True),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_a_strategy_that_adds_noise_is_not_taken_for_a_mean(strategy: Any) -> None:
    assert server_plan_of(SimpleNamespace(strategy=strategy)) == NOISED
    strategy.noise_multiplier = 0.0
    assert server_plan_of(strategy) == PLAIN_MEAN


def test_arrays_that_a_site_does_not_upload_are_not_seen() -> None:
    again, own = reply(0.01, "weights"), reply(-0.03, "weights")
    own = replace(own, matched=Matched(shares="weights"))
    with pytest.raises(NotAttackedError, match="both sites"):
        seen_by_site(again, own, 1, PLAIN_MEAN)


def test_members_are_compared_with_others_of_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that fall by the length of a text, whether it was trained on or not, show no member."""

    class ByLength:
        def of(self, examples: Sequence[Sequence[Tensor]], values: Mapping[str, Tensor]) -> np.ndarray:
            return np.array([float(one[0].shape[1] * values["w"]) + rng.normal(0, 1e-3) for one in examples])

        def each_takes(self, *_: object) -> float:
            return 1e-3

    def texts(short: int, long: int) -> list[list[Tensor]]:
        return [[torch.randint(1000, (number, length))] for number, length in ((short, 4), (long, 12))]

    rng = np.random.default_rng(0)
    monkeypatch.setattr(scenario_final, "losses_from", lambda single: ByLength())
    client: Any = SimpleNamespace(watched=Watched(batches=texts(20, 60), before={"w": torch.tensor(1.0)}))
    answer = scenario_final._participants([client], {"w": torch.tensor(0.5)}, None, texts(60, 20), 60.0)
    assert answer.estimate is not None and answer.estimate.low < 0.5 < answer.estimate.high
    assert "40 examples" in answer.scenario.uploads
    with pytest.raises(NotAttackedError, match=r"at least 8 .* but got [0-7];"):
        scenario_final._participants([client], {"w": torch.tensor(0.5)}, None, texts(4, 3), 60.0)
