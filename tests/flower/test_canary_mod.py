"""Canaries in other people's apps: what passes the mods shows their epsilon, and nothing else is changed."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.supercore.task_identity import TaskIdentity

from fl_privacy.errors import UserError
from fl_privacy.flower import canary_mod
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.flower.mods.canary_mod import CANARIES, SCORES, canaries_of
from fl_privacy.runs.folder.claims import read_claims

MODEL = {"weight": torch.linspace(-1, 1, 40).view(5, 8), "bias": torch.zeros(5)}


@pytest.fixture(autouse=True)
def identified() -> None:
    identify_process()


def context(partition: int = 0) -> Context:
    return Context(1, 1, {"partition-id": partition, "num-partitions": 2}, RecordDict(), {})


def question(round: int, kind: str = "train") -> Message:
    config = ConfigRecord({"server-round": round, "clipping_norm": 1.0})
    return Message(RecordDict({"arrays": ArrayRecord(MODEL), "config": config}), 1, kind)


def app(message: Message, _: Context) -> Message:
    """Move by what the global streams say, as a training without a seed does."""
    step = float(torch.rand(())) + np.random.rand() + random.random()
    arrays = ArrayRecord({name: value + step for name, value in MODEL.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 3})}), reply_to=message)


def answers(mod: object, node: Context, rounds: int = 2) -> list[dict[str, np.ndarray]]:
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    replies = [mod(question(round), node, app) for round in range(1, rounds + 1)]  # type: ignore[operator]
    return [{n: a.numpy() for n, a in r.content.array_records["arrays"].items()} for r in replies]


@pytest.mark.parametrize(("sensitivity", "status"), [(1.0, "open"), (0.0, "contradicted")])
def test_a_mod_without_noise_is_found_and_an_honest_one_is_not(tmp_path: Path, sensitivity: float, status: str) -> None:
    node = context()
    answers(canary_mod(LocalDpMod(1.0, sensitivity, 3.0, 1e-5), number=500, out=tmp_path), node)
    (claim,) = read_claims(tmp_path)
    assert claim.status == status
    assert claim.subject == "a client's mods in each round" and claim.claimed == 3.0
    assert claim.lower is not None and (claim.lower > 3.0) is (status == "contradicted")
    assert "promised protection" in (tmp_path / "claim.html").read_text()


def test_replies_and_streams_are_those_without_canaries() -> None:
    def protected() -> LocalDpMod:
        return LocalDpMod(1.0, 1.0, 3.0, 1e-5)

    plain, with_them = answers(protected(), context()), answers(canary_mod(protected(), number=20), context())
    after = float(torch.rand(())), np.random.rand(), random.random()
    answers(protected(), context())
    assert after == (float(torch.rand(())), np.random.rand(), random.random())
    for one, other in zip(plain, with_them, strict=True):
        assert {name: value.tobytes() for name, value in one.items()} == {
            name: value.tobytes() for name, value in other.items()
        }


def test_nothing_of_them_is_in_a_reply() -> None:
    node = context()
    reply = canary_mod(LocalDpMod(1.0, 1.0, 3.0, 1e-5), number=20)(question(1), node, app)
    assert set(reply.content.keys()) == {"arrays", "metrics"}
    assert CANARIES in node.state and SCORES in node.state
    assert node.state[SCORES]["scores"].data not in [a.data for a in reply.content["arrays"].values()]  # type: ignore


def test_rounds_have_canaries_of_their_own_unless_the_training_is_claimed() -> None:
    each, whole = context(), context()
    answers(canary_mod(LocalDpMod(1.0, 1.0, 3.0, 1e-5), number=30), each, rounds=3)
    answers(canary_mod(LocalDpMod(1.0, 1.0, 3.0, 1e-5), number=30, claimed=5.0), whole, rounds=3)
    of_each, of_whole = canaries_of(each), canaries_of(whole)
    assert of_each is not None and of_whole is not None
    assert (of_each.number, of_whole.number) == (90, 30)


def test_other_nodes_and_evaluations_are_left_alone() -> None:
    other = context(partition=1)
    answers(canary_mod(LocalDpMod(1.0, 1.0, 3.0, 1e-5), number=20), other)
    assert not other.state
    node, asked = context(), []

    def evaluate(message: Message, _: Context) -> Message:
        asked.append(message)
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 3})}), reply_to=message)

    canary_mod(LocalDpMod(1.0, 1.0, 3.0, 1e-5), number=20)(question(1, "evaluate"), node, evaluate)
    assert len(asked) == 1 and not node.state


def test_own_mods_get_the_model_as_it_is() -> None:
    seen = set()

    def own(message: Message, node: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, node)
        seen.update((name, tuple(a.shape)) for name, a in reply.content.array_records["arrays"].items())
        return reply

    node = context()
    answers(canary_mod(own, fixedclipping_mod, clip_norm=1.0, number=20), node, rounds=1)
    assert seen == {("weight", (5, 8)), ("bias", (5,))}
    found = canaries_of(node)
    assert found is not None and found.bound == pytest.approx(found.showable), "nothing hides them"


def test_a_mod_that_fails_on_them_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def once(message: Message, node: Context, call_next: ClientAppCallable) -> Message:
        calls.append(message)
        if len(calls) > 1:
            raise RuntimeError("only once")
        return call_next(message, node)

    reply = canary_mod(once, clip_norm=1.0, number=20)(question(1), context(), app)
    assert not reply.has_error()
    assert "took no part" in caplog.text and "only once" in caplog.text


def test_noise_of_any_shape_gets_a_bound_that_assumes_nothing() -> None:
    node = context()
    answers(canary_mod(LocalDpMod(1.0, 1.0, 8.0, 1e-5), number=200), node)
    by_curve, by_nothing = canaries_of(node), canaries_of(node, noise="other")
    assert by_curve is not None and by_nothing is not None
    assert (by_curve.noise, by_nothing.noise) == ("gaussian", "other") and by_curve.bound > by_nothing.bound > 0
    with pytest.raises(UserError, match="noise is expected to be"):
        canary_mod(LocalDpMod(1.0, 1.0, 8.0, 1e-5), noise="laplace")  # type: ignore[arg-type]


def test_what_it_needs_is_said() -> None:
    with pytest.raises(UserError, match="got none"):
        canary_mod()
    with pytest.raises(UserError, match=r"clip_norm=1\.0"):
        canary_mod(fixedclipping_mod)
    with pytest.raises(UserError, match="only clip"):
        canary_mod(fixedclipping_mod, clip_norm=1.0, claimed=3.0)


def test_a_claim_of_a_mod_is_tested_at_its_own_delta(tmp_path: Path) -> None:
    answers(canary_mod(LocalDpMod(1.0, 0.78, 1.0, 1e-3), number=40, out=tmp_path), context(), rounds=1)
    (claim,) = read_claims(tmp_path)
    assert claim.delta == 1e-3 and claim.pld is not None and claim.pld < 1.0 and not claim.is_false


def test_mods_keep_their_own_streams_and_the_process_its_identity() -> None:
    class Noise:
        def __init__(self) -> None:
            self.rng, self.calls = np.random.default_rng(0), 0

        def __call__(self, message: Message, node: Context, call_next: ClientAppCallable) -> Message:
            self.calls += 1
            reply = call_next(message, node)
            (record,) = reply.content.array_records.values()
            noised = {n: a.numpy() + self.rng.normal(size=a.shape).astype(np.float32) for n, a in record.items()}
            reply.content["arrays"] = ArrayRecord({n: Array.from_numpy_ndarray(a) for n, a in noised.items()})
            return reply

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 7, 8, 9
    plain, mod = answers(Noise(), context()), Noise()
    node = context()
    with_them = answers(canary_mod(mod, clip_norm=1.0, number=20), node)
    assert (TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id) == (7, 8, 9)
    assert mod.calls == 2 and canaries_of(node) is not None
    assert all(np.array_equal(one[n], other[n]) for one, other in zip(plain, with_them, strict=True) for n in one)


def test_canaries_of_another_kind_begin_anew() -> None:
    node = context()
    answers(canary_mod(LocalDpMod(1.0, 1.0, 3.0, 1e-5), number=30, claimed=9.0), node)
    answers(canary_mod(LocalDpMod(1.0, 1.0, 3.0, 1e-5), number=20), node, rounds=1)
    found = canaries_of(node)
    assert found is not None and found.number == 20


def test_mods_that_send_nothing_are_not_accused(tmp_path: Path) -> None:
    def silent(message: Message, node: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, node)
        reply.content["arrays"] = ArrayRecord()
        return reply

    node = context()
    answers(canary_mod(silent, clip_norm=1.0, claimed=0.1, out=tmp_path), node, rounds=1)
    (claim,) = read_claims(tmp_path)
    assert claim.lower == 0 and not claim.is_false
