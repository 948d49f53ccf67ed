"""A node answers a question of a round once: asked again, also after a restart, it gives the same bytes or none."""

import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp.typing import Mod
from torch import nn

from fl_privacy import defend, defense_mod, probe_mod
from fl_privacy.defenses import dp_noise, pruning, split_fed
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import WITHHELD
from fl_privacy.flower import (
    DPClient,
    answer_once_mod,
    node_memory,
    numpy_client_app,
    reply_cache as answers,
    train_step,
)
from fl_privacy.flower._node_memory import MOST_AHEAD
from fl_privacy.flower.grids import LocalGrid
from fl_privacy.flower.inside.legacy import NumPyClient
from fl_privacy.flower.records import plain_array
from fl_privacy.flower.reply_cache import Answers
from tests.flower.oracles import seen
from tests.flower.test_asked_again import deployed
from tests.flower.test_switched_off import asked, refusal, trains, values

NOISE = dp_noise(scale=1.0, clip_norm=1.0)
NET = nn.Linear(4, 3)
SENT = {name: t.numpy() for name, t in NET.state_dict().items()}
OTHER = {name: array + np.float32(1e-6) for name, array in SENT.items()}


def node(run: int = 1, **run_config: Any) -> Context:
    """Make the node as it starts: Flower has forgotten what its context held."""
    return Context(run, 1, UserConfig({"partition-id": 0, "num-partitions": 2}), RecordDict(), UserConfig(run_config))


def as_bytes(reply: Message) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in values(reply).items()}


def defended() -> Mod:
    return defense_mod(NOISE, model=NET)


def test_the_same_question_is_answered_with_the_same_bytes_and_another_one_not() -> None:
    mod, place = defended(), node()
    first = mod(asked(SENT, 3), place, trains)
    for _ in range(3):
        assert as_bytes(mod(asked(SENT, 3), place, trains)) == as_bytes(first)
    for sent, round in ((OTHER, 3), (SENT, 2), (OTHER, 1)):
        assert "answered before" in refusal(mod(asked(sent, round), place, trains))
    assert as_bytes(mod(asked(SENT, 4), place, trains)) != as_bytes(first)
    assert "number of the round" in refusal(mod(asked(SENT, None), place, trains))


def test_a_question_that_is_spelled_otherwise_is_the_same_one() -> None:
    """Flower calls the same function for train.default as for train."""
    mod, place = defended(), node()
    message = asked(SENT, 3)
    message.metadata._message_type = "train.default"  # type: ignore[attr-defined]
    assert mod(message, place, trains).has_content()
    assert "answered before" in refusal(mod(asked(SENT, 3), place, trains))
    assert "answered before" in refusal(mod(asked(OTHER, 3), place, trains))


def test_the_same_answer_says_the_same_beside_its_arrays() -> None:
    mod, place = defended(), node()
    first, again = (mod(asked(SENT, 3), place, trains).content for _ in range(2))
    assert list(first) == list(again)
    assert first.metric_records == again.metric_records and first.config_records == again.config_records


def test_a_restart_forgets_neither_rounds_nor_answers() -> None:
    first = defended()(asked(SENT, 3), node(), trains)
    assert as_bytes(defended()(asked(SENT, 3), node(), trains)) == as_bytes(first)
    assert "answered before" in refusal(defended()(asked(OTHER, 3), node(), trains))
    assert "answered before" in refusal(defended()(asked(SENT, 2), node(), trains))
    assert defended()(asked(SENT, 4), node(), trains).has_content()
    assert defended()(asked(OTHER, 3), node(run=2), trains).has_content()


def test_four_hundred_questions_do_not_average_the_noise_away() -> None:
    """The mean of 400 answers with noise of their own has a cosine of 0.99 with the update."""
    moved = torch.linspace(-1, 1, 15)
    moved = moved / moved.norm()
    noised = []
    for k in range(400):
        sent = {name: array + np.float32(k * 1e-7) for name, array in SENT.items()} if k % 2 else SENT
        reply = defense_mod(dp_noise(scale=0.5, clip_norm=1.0), model=NET)(asked(sent, 1), node(), trained_by(moved))
        if not reply.has_error():
            noised.append(np.concatenate([(v - sent[n]).flatten() for n, v in values(reply).items()]))
    assert len(noised) == 200 and len(np.unique(noised, axis=0)) == 1


def trained_by(moved: torch.Tensor) -> Callable[[Message, Context], Message]:
    def app(message: Message, _: Context) -> Message:
        (record,) = message.content.array_records.values()
        parts = torch.split(moved, [array.numpy().size for array in record.values()])
        arrays = [a.numpy() + p.numpy().reshape(a.numpy().shape) for a, p in zip(record.values(), parts, strict=True)]
        named = ArrayRecord(
            dict(zip(record, ArrayRecord.from_numpy_ndarrays([a.astype("f4") for a in arrays]).values(), strict=True))
        )
        return Message(RecordDict({"arrays": named, "m": MetricRecord({"num-examples": 1})}), reply_to=message)

    return app


def kept_files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "own-state").rglob("*") if path.is_file())


def test_what_is_kept_is_its_owner_s_and_sealed_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    monkeypatch.setenv("FL_PRIVACY_KEY", str(key))
    first = defended()(asked(SENT, 3), node(), trains)
    assert as_bytes(defended()(asked(SENT, 3), node(), trains)) == as_bytes(first)
    files = kept_files(tmp_path)
    assert {path.suffix for path in files} == {".answered", ".answer", ".lock", ".form"}
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.suffix == ".lock" or path.read_bytes().startswith(b"fl-privacy sealed 1\n")


def test_what_is_kept_is_bounded_and_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defended()(asked(SENT, 1), node(), trains)
    (size,) = (path.stat().st_size for path in kept_files(tmp_path) if path.suffix == ".answer")
    monkeypatch.setattr(answers, "MOST_KEPT", int(2.5 * size))
    for run in range(2, 5):
        defended()(asked(SENT, 1), node(run), trains)
    kept = [path.parent.name for path in kept_files(tmp_path) if path.suffix == ".answer"]
    assert kept == ["run-3", "run-4"]
    assert "answered before" in refusal(defended()(asked(SENT, 1), node(), trains))
    monkeypatch.setattr(answers, "MOST_KEPT", 10)
    assert defended()(asked(SENT, 2), node(4), trains).has_content()
    assert "answered before" in refusal(defended()(asked(SENT, 2), node(4), trains))


def test_answers_that_can_not_be_looked_up_are_not_given_anew(tmp_path: Path) -> None:
    defended()(asked(SENT, 1), node(), trains)
    (counted,) = (path for path in kept_files(tmp_path) if path.suffix == ".answered")
    counted.write_bytes(b"[")
    said = refusal(defended()(asked(SENT, 2), node(), trains))
    assert "its own log says why" in said and str(tmp_path) not in said


def test_nothing_leaves_where_it_can_not_be_written_down(tmp_path: Path) -> None:
    (tmp_path / "own-state").write_text("a file where the folder would be")
    assert "its own log says why" in refusal(defended()(asked(SENT, 1), node(), trains))


@pytest.mark.parametrize(
    ("config", "told", "most"), [({"num-server-rounds": 10}, None, 10), ({}, 7, 7), ({}, None, MOST_AHEAD)]
)
def test_a_round_that_the_run_does_not_have_locks_nobody_out(config: dict[str, Any], told: Any, most: int) -> None:
    mod, place = defense_mod(NOISE, model=NET, rounds=told), node(**config)
    for round in (most + 1, 10**9, 2**62, -1):
        assert f"0 to {most}" in refusal(mod(asked(SENT, round), place, trains))
    assert mod(asked(SENT, 1), place, trains).has_content()
    assert mod(asked(SENT, most), place, trains).has_content()


def test_without_a_number_of_rounds_one_goes_on_from_the_last() -> None:
    mod, place = defended(), node()
    for round in range(900, 5000, 900):
        assert mod(asked(SENT, round), place, trains).has_content()
    assert "0 to 5500" in refusal(mod(asked(SENT, 5501), place, trains))


def asked_for_probe(number: int, size: int = 1, round: int = 1) -> Message:
    message = asked(SENT, round)
    message.content["probe"] = ConfigRecord({"fl-privacy.victim": number, "fl-privacy.batch-size": size})
    return message


def test_an_app_without_probes_is_not_trained_again_by_asking_for_them() -> None:
    mod, place = defended(), node()
    assert mod(asked(SENT, 1), place, trains).has_content()
    for number in range(40):
        assert refusal(mod(asked_for_probe(number), place, trains)) == WITHHELD


def pictures() -> list[tuple[torch.Tensor, int]]:
    return [(torch.rand((1, 2, 2), generator=torch.Generator().manual_seed(k)), k % 3) for k in range(8)]


def train(net: nn.Module, loader: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in loader:
        nn.functional.cross_entropy(net(images.flatten(1)), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("in_front", [False, True])
def test_an_image_leaves_once_a_round_whatever_batch_it_is_in(in_front: bool) -> None:
    probe = probe_mod(model=NET, train=train, dataset=pictures(), images=8)

    def answer(message: Message, place: Context) -> Message:
        def inner(message: Message, context: Context) -> Message:
            return probe(message, context, trains)

        return defended()(message, place, inner) if in_front else inner(message, place)

    place = node()
    first = answer(asked_for_probe(1, 2), place)
    assert as_bytes(answer(asked_for_probe(1, 2), node())) == as_bytes(first)
    for number, size in ((2, 1), (3, 1), (0, 4), (0, 8), (1, 2)):
        if (number, size) != (1, 2):
            assert "answered before" in refusal(answer(asked_for_probe(number, size), place))
    assert "first 8 examples" in refusal(answer(asked_for_probe(8), place))
    assert answer(asked_for_probe(0), place).has_content()
    assert answer(asked_for_probe(2, 1, round=2), node()).has_content()


def replies_weights(message: Message, _: Context) -> Message:
    return Message(RecordDict({"weights": message.content.array_records["arrays"]}), reply_to=message)


@pytest.mark.parametrize("kind", ["evaluate", "query", "query.parameters"])
def test_weights_leave_with_training_replies_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    message = asked(SENT, 1)
    message.metadata._message_type = kind  # type: ignore[attr-defined]
    assert refusal(defended()(message, node(), replies_weights)) == WITHHELD
    assert "but got them in another reply; take them out" in caplog.text


def of_kind(kind: str, round: int | None, sent: Any = SENT) -> Message:
    message = asked(sent, round)
    message.metadata._message_type = kind  # type: ignore[attr-defined]
    return message


def test_a_query_is_a_question_that_is_counted_and_a_promise_keeps_its_figures() -> None:
    def states(message: Message, context: Context) -> Message:
        exact = {"loss": 0.123456789, "millionths": 123456, "all": [0.123456, 2.0], "num-examples": 12345}
        told = ConfigRecord({**exact, "sure": True, "name": "a name"})
        return Message(RecordDict({"metrics": MetricRecord(exact), "told": told}), reply_to=message)

    left = {"loss": 0.123, "millionths": 123000, "all": [0.123, 2.0], "num-examples": 12345}
    for number, kind in enumerate(("query", "query.facts", "evaluate")):
        for defense in (NOISE, pruning(rate=0.5)):
            mod, place = defense_mod(defense, model=NET), node(run=10 + 2 * number + (defense is NOISE))
            first = mod(of_kind(kind, 1), place, states)
            told = {name: dict(record) for name, record in first.content.items()}
            if defense is NOISE:
                assert told == {"metrics": {"num-examples": 12345}}
            else:
                assert told == {"metrics": left, "told": {**left, "sure": True, "name": "a name"}}
            assert "answered before" in refusal(mod(of_kind(kind, 1, OTHER), place, states))
            assert "number of the round" in refusal(mod(of_kind(kind, None), place, states))


def test_behind_a_promise_a_query_that_fails_looks_like_one_of_its_kind() -> None:
    def states(message: Message, context: Context) -> Message:
        name = message.metadata.message_type.partition(".")[2]
        return Message(RecordDict({name: MetricRecord({"num-examples": 1, "loss": 0.1})}), reply_to=message)

    mod, place = defended(), node()
    for kind in ("query.one", "query.other"):
        assert mod(of_kind(kind, 1), place, states).has_content()
    for kind in ("query.one", "query.other"):
        failed = seen(mod(of_kind(kind, 2), place, fails))
        assert failed == seen(mod(of_kind(kind, 3), place, states))


def fails(message: Message, context: Context) -> Message:
    raise RuntimeError("patient 7 of /home/clinic\n is missing")


def test_what_an_app_raises_stays_in_the_node_s_log(caplog: pytest.LogCaptureFixture) -> None:
    assert refusal(defended()(asked(SENT, 1), node(), fails)) == WITHHELD
    assert "patient 7" in caplog.text


def test_a_question_is_counted_before_the_app_works_on_it_and_a_refusal_is_its_answer() -> None:
    assert refusal(defended()(asked(SENT, 1), node(), fails)) == WITHHELD
    assert refusal(defended()(asked(SENT, 1), node(), trains)) == WITHHELD, "kept, also after a restart"
    assert "answered before" in refusal(defended()(asked(OTHER, 1), node(), trains))


def test_who_fails_first_behind_a_promise_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """Else each round would tell a bit, an error or an answer, until the first answer."""
    asked_at = []

    def counts(message: Message, context: Context) -> Message:
        asked_at.append(context.run_id)
        return trains(message, context)

    assert refusal(defended()(asked(SENT, 1), node(), fails)) == WITHHELD
    for run in (1, 2):
        assert refusal(defended()(asked(OTHER, 2), node(run=run), counts)) == WITHHELD
    assert not asked_at and "not asked again until its operator removes" in caplog.text
    allowed = next(Path(word) for word in caplog.text.split() if word.rstrip(".").endswith(".form"))
    Path(str(allowed).rstrip(".")).unlink()
    assert defended()(asked(OTHER, 3), node(), counts).has_content() and asked_at


def test_behind_a_promise_a_failure_looks_like_an_earlier_reply_and_takes_as_long() -> None:
    def slowly(message: Message, context: Context) -> Message:
        time.sleep(0.2)
        return trains(message, context)

    first = defended()(asked(SENT, 1), node(), slowly)
    started = time.perf_counter()
    failed = defended()(asked(SENT, 1), node(run=2), fails)
    assert time.perf_counter() - started > 0.19
    assert seen(failed) == seen(first)
    assert as_bytes(failed) == as_bytes(defended()(asked(SENT, 1), node(run=2), trains)), "and it is kept"
    change = np.concatenate([(v - SENT[name]).ravel() for name, v in values(failed).items()])
    assert np.abs(change).max() > 0.1, "it is noise"


@pytest.mark.parametrize("app", ["replies", "fails"])
def test_an_app_that_writes_into_the_message_has_its_weights_clipped_too(app: str) -> None:
    def writes(message: Message, context: Context) -> Message:
        sent = {
            name: array.numpy() + np.float32(1e6) for name, array in message.content.array_records["arrays"].items()
        }
        message.content["arrays"] = ArrayRecord({name: plain_array(value) for name, value in sent.items()})
        if app == "fails":
            raise ValueError
        return Message(message.content, reply_to=message)

    assert defended()(asked(SENT, 1), node(), trains).has_content()
    replied = values(defended()(asked(SENT, 2), node(), writes))
    assert max(np.abs(value - SENT[name]).max() for name, value in replied.items()) < 100


def test_without_a_promise_a_failure_is_the_same_line_each_time() -> None:
    mod = defense_mod(pruning(rate=0.5), model=NET)
    assert mod(asked(SENT, 1), node(), trains).has_content()
    assert refusal(mod(asked(SENT, 2), node(), fails)) == WITHHELD


def stepped(round: int | None, place: Context, value: float = 0.0) -> None:
    net = nn.Linear(4, 3)
    nn.init.constant_(net.weight, value)
    with train_step(split_fed(), net, place, round=round) as step:
        step(torch.rand(2, 4), torch.tensor([0, 1]))


def test_a_round_is_trained_once_also_after_a_restart() -> None:
    stepped(1, node())
    for value in (0.0, 1e-6):  # nor on other weights
        with pytest.raises(UserError, match="answered before"):
            stepped(1, node(), value)
    with pytest.raises(UserError, match=f"0 to {1 + MOST_AHEAD}"):
        stepped(10**9, node())
    with pytest.raises(UserError, match="0 to 3"):
        stepped(4, node(**{"num-server-rounds": 3}))
    stepped(2, node())
    with pytest.raises(UserError, match="expected to get round="):
        stepped(None, node())


def test_simulated_nodes_may_train_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    place = LocalGrid([0]).contexts[1000]
    for _ in range(2):
        stepped(None, place)
    monkeypatch.setenv("FL_PRIVACY_SIMULATION", "1")
    stepped(None, node())


def test_an_app_that_draws_in_its_training_answers_with_the_same_bytes() -> None:
    def app(message: Message, context: Context) -> Message:
        stepped(int(message.content.config_records["config"]["server-round"]), context)  # type: ignore[arg-type]
        (record,) = message.content.array_records.values()
        noise = [torch.randn(a.numpy().shape).numpy() for a in record.values()]
        named = ArrayRecord(dict(zip(record, ArrayRecord.from_numpy_ndarrays(noise).values(), strict=True)))
        return Message(RecordDict({"arrays": named}), reply_to=message)

    first = answer_once_mod()(asked(SENT, 1), node(), app)
    assert as_bytes(answer_once_mod()(asked(SENT, 1), node(), app)) == as_bytes(first)
    assert "answered before" in refusal(answer_once_mod()(asked(OTHER, 1), node(), app))


class Foreign(NumPyClient):
    """Adds one to what it is sent."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return [array + np.float32(1) for array in parameters], 5, {"loss": 0.5, "why": "x", "ok": True}


def fitted(memory: Any, sent: dict[str, np.ndarray] = SENT, round: int = 1) -> Any:
    return defend(Foreign(), NOISE, model=NET, memory=memory, metrics=("why", "ok")).fit(
        list(sent.values()), {"server-round": round}
    )


def test_a_wrapped_client_with_the_node_s_context_gives_the_same_bytes_after_a_restart() -> None:
    arrays, number, said = fitted(node())
    again, number_again, said_again = fitted(node())
    assert [a.tobytes() for a in again] == [a.tobytes() for a in arrays]
    assert (number_again, said_again) == (number, said) == (5, {"why": "x", "ok": True})
    with pytest.raises(UserError, match="answered before"):
        fitted(node(), OTHER)
    with pytest.raises(UserError, match="0 to 1001"):
        fitted(node(), SENT, 10**9)
    fitted(node(), SENT, 2)


def test_with_its_state_alone_it_refuses_until_the_node_restarts() -> None:
    state = RecordDict()
    fitted(state)
    for sent in (SENT, OTHER):
        with pytest.raises(UserError, match="answered before"):
            fitted(state, sent)
    with pytest.raises(UserError, match="0 to 1001"):
        fitted(state, SENT, 10**9)
    fitted(state, SENT, 2)


@pytest.mark.parametrize("in_file", [False, True])
def test_clients_behind_the_app_give_the_same_bytes_after_a_restart(in_file: bool) -> None:
    def make(context: Context) -> DPClient:
        memory = node_memory(context) if in_file else context.state
        client = deployed()
        weights = replace(client, plan=replace(client.plan, shares="weights"))
        return DPClient(weights, memory, clip_norm=1.0, scale=0.1)

    def reply(place: Context, round: int = 1, add: float = 0.0) -> Message:
        held = deployed().model.state_dict()
        sent = {name: np.asarray(t.numpy() + np.asarray(add, t.numpy().dtype)) for name, t in held.items()}
        return numpy_client_app(make)(asked(sent, round), place)

    first = reply(node())
    assert as_bytes(reply(node())) == as_bytes(first)
    assert "answered before" in refusal(reply(node(), add=1e-6))
    assert "answered before" in refusal(reply(node(), round=0))
    assert "0 to 1001" in refusal(reply(node(), round=10**9))
    assert as_bytes(reply(node(), round=2)) != as_bytes(first)


def test_two_processes_of_a_node_count_together() -> None:
    one, other = node(), node()
    Answers(one).expect_new("train", 1)
    Answers(other).expect_new("train", 1)
    Answers(one).note(1, "train")
    with pytest.raises(UserError, match="answered before"):
        Answers(other).note(1, "train")
