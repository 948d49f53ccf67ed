"""Hostile apps behind the gate, in a process of their own: the bytes of a reply do not depend on what they know."""

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_privacy.flower import gate as gate_module
from fl_privacy.flower.app_process import Cell
from fl_privacy.flower.gate import Gate
from fl_privacy.flower.inside.identity import identify_process, identity_put_back
from fl_privacy.flower.inside.legacy import (
    FitIns,
    NumPyClient,
    fitins_to_recorddict,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
    recorddict_to_fitres,
)
from fl_privacy.flower.inside.serialized import bytes_of, message_bytes, message_of
from fl_privacy.site.gate.policy import LEAST_MEMORY, AppLimits, SitePolicy, parse_policy
from fl_privacy.site.gate.rules import REASONS, RefusedError
from tests.gate import apps
from tests.gate.apps import OPEN, SECRETS

POLICY = OPEN.replace("ledger/ledger", "site/ledger").replace("anchor/anchor", "away/anchor")

APP = "tests.gate.apps"
ASKED_AT = time.time()


@pytest.fixture(autouse=True)
def identified() -> Iterator[None]:
    with identity_put_back():
        identify_process()
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a site's folder: key, ledger, policy; the example in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("site", "away", "data"):
        (folder / name).mkdir(mode=0o700)
    (folder / "site" / "node.key").write_bytes(b"the key of the node")
    (folder / "site" / "site.yaml").write_text(POLICY)
    return folder


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """Listen at an address of this machine, as a SuperLink or a SuperNode's Runtime API does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.1)
        yield server


def limits(site: Path, **more: Any) -> AppLimits:
    told = {"reads": (site / "data",), "most_bytes": 4 << 30, "seconds": 120.0, "required": False}
    return AppLimits(**{**told, **more})


@pytest.fixture(scope="module")
def cell(site: Path) -> Iterator[Cell]:
    root = Path(__file__).resolve().parents[2]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(root)
    os.environ["NODE_SECRET_KEY"] = "a variable of the node"
    found = Cell(f"{APP}:hostile", limits(site))
    found.start()
    try:
        yield found
    finally:
        found.close()
        os.environ.pop("NODE_SECRET_KEY")
        os.environ["PYTHONPATH"] = before or ""
        if before is None:
            os.environ.pop("PYTHONPATH")


def policy(site: Path, text: str = POLICY) -> SitePolicy:
    return parse_policy(text.encode(), "site.yaml", site)


def question(case: int = 0, kind: str = "train", w: np.ndarray | None = None) -> Message:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 16)).astype(np.float32) if w is None else w
    arrays = {"w": w, "b": np.zeros(8, np.float32), "n": np.array(3)}
    content = {
        "arrays": ArrayRecord({key: Array.from_numpy_ndarray(value) for key, value in arrays.items()}),
        "config": ConfigRecord({"case": case}),
    }
    made = message_of(message_bytes(Message(RecordDict(content), 1, kind)))
    made.metadata.__dict__["_message_id"] = "1"
    made.metadata.__dict__["_created_at"] = ASKED_AT
    return made


def context(site: Path, listener: socket.socket | None = None) -> Context:
    address = "127.0.0.1:1" if listener is None else "{}:{}".format(*listener.getsockname())
    config = {
        "data": str(site / "data" / "example"),
        "key": str(site / "site" / "node.key"),
        "ledger": str(site / "site" / "ledger"),
        "anchor": str(site / "away" / "anchor"),
        "policy": str(site / "site" / "site.yaml"),
        "address": address,
        "gate": os.getpid(),
    }
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={"overrides": "x"})


def said(reply: Message) -> bytes:
    """All of a reply that an app could have touched, as bytes of the wire."""
    about = reply.metadata
    until = (
        about.created_at + about.ttl - ASKED_AT
    )  # both say when the reply was made, which its time of leaving does too
    told = f"{about.dst_node_id} {about.src_node_id} {about.message_type} {about.group_id} {until:.3f}".encode()
    if reply.has_error():
        return told + f"{reply.error.code} {reply.error.reason}".encode()
    return told + bytes_of(reply.content)


@dataclass(frozen=True)
class World:
    """Of a hostile app: its process, the site's folder, an address."""

    cell: Cell
    site: Path
    listener: socket.socket

    def asked(self, gate: Gate, case: str, example: bytes) -> Message:
        """Return the gate's reply where the app knows ``example`` and tries ``case``."""
        (self.site / "data" / "example").write_bytes(example)
        return gate(question(apps.CASES.index(case)), context(self.site, self.listener), self.cell)


@pytest.fixture
def world(cell: Cell, site: Path, listener: socket.socket) -> World:
    return World(cell, site, listener)


@pytest.mark.parametrize("case", apps.CASES)
def test_a_reply_does_not_depend_on_what_a_hostile_app_knows(case: str, world: World) -> None:
    gate = Gate(policy(world.site), name="hostile")
    replies = [world.asked(gate, case, example) for example in SECRETS]
    first, second = map(said, replies)
    assert first == second
    for example in SECRETS:
        assert example[:8] not in first and example[:8].hex().encode() not in first
    if replies[0].has_error():
        assert replies[0].error.reason in {f"The site's policy lets no reply leave: {why}." for why in REASONS.values()}
    with pytest.raises(TimeoutError):
        world.listener.accept()
    assert {entry.app for entry in gate.ledger.entries()} == {"hostile"}  # type: ignore[union-attr]


def test_what_the_app_can_reach_of_the_site_is_nothing(world: World) -> None:
    """The app replies as an honest one where it reaches neither key, ledger, policy, address nor the gate."""
    reply = world.asked(Gate(policy(world.site)), "files", SECRETS[0])
    assert world.cell.held is not None
    if not world.cell.held.is_enough:
        pytest.skip(world.cell.held.in_words())
    assert reply.has_content(), "see the log for what was reached"


def test_the_site_s_log_says_what_was_refused(world: World, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(policy(world.site))
    with caplog.at_level(logging.WARNING):
        world.asked(gate, "names_of_keys", SECRETS[0])
    assert SECRETS[0].hex() in caplog.text
    assert gate.refused[-1][0] == "key"
    bare = Gate(policy(world.site, POLICY.replace("sends:", "sends:\n  refusals: bare")))
    lines = {world.asked(bare, case, SECRETS[0]).error.reason for case in ("names_of_keys", "raised_text")}
    assert lines == {"The site's policy lets no reply leave."}


def test_an_honest_reply_leaves_bit_for_bit(world: World) -> None:
    reply = world.asked(Gate(policy(world.site)), "memory_order", bytes(64))
    sent = question().content.array_records["arrays"]
    assert {k: a.data for k, a in reply.content.array_records["arrays"].items()} == {k: a.data for k, a in sent.items()}
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 64, "train_loss": 0.5}


def test_a_reply_leaves_at_a_time_that_says_little(site: Path) -> None:
    slow = {"seconds": 0.0}

    def app(message: Message, context: Context) -> Message:
        time.sleep(slow["seconds"])
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    gate = Gate(policy(site, POLICY.replace("sends:", "sends:\n  every_seconds: 0.5"))).around(app)
    for seconds in (0.0, 0.2):
        slow["seconds"], started = seconds, time.monotonic()
        assert gate(question(), context(site)).has_content()
        assert 0.5 <= time.monotonic() - started < 0.75


def test_messages_that_the_policy_does_not_name_never_reach_the_app(site: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        pytest.fail("asked")

    gate = Gate(policy(site)).around(app)
    before = len(Gate(policy(site)).ledger.entries())  # type: ignore[union-attr]
    for kind in ("query", "evaluate", "train.other"):
        assert "of this kind" in gate(question(kind=kind), context(site)).error.reason
    assert len(Gate(policy(site)).ledger.entries()) == before  # type: ignore[union-attr]


def test_the_app_is_given_its_own_state_and_of_the_run_what_is_named(site: Path) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []

    def app(message: Message, context: Context) -> Message:
        calls = int(context.state.metric_records.get("own", MetricRecord({"calls": 0}))["calls"])  # type: ignore[arg-type]
        seen.append((calls, dict(context.run_config)))
        context.state["own"] = MetricRecord({"calls": calls + 1})
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    gate, outer = Gate(policy(site)).around(app), context(site)
    outer.run_config = {"overrides": "defense=none", "lr": 0.1}
    gate(question(), outer)
    gate(question(), outer)
    assert seen == [(0, {}), (1, {})]
    assert not outer.state, "what the app keeps goes no further than the gate"
    open_gate = Gate(policy(site, POLICY.replace("guard: off", "guard: off\n  run_config: [lr]"))).around(app)
    open_gate(question(), outer)
    assert seen[-1] == (0, {"lr": 0.1})


def test_a_crafted_model_is_refused(site: Path) -> None:
    gate = Gate(policy(site, POLICY.replace("guard: off", "guard: on")))
    around = gate.around(lambda m, c: Message(RecordDict({"arrays": m.content.array_records["arrays"]}), reply_to=m))
    rng = np.random.default_rng(1)
    honest = rng.normal(size=(16, 16)).astype(np.float32)
    assert around(question(w=honest), context(site)).has_content()
    imprint = np.tile(honest[:1], (16, 1))
    assert "looks crafted" in around(question(w=imprint), context(site)).error.reason
    other = rng.normal(size=(16, 16)).astype(np.float32)
    assert "looks crafted" in around(question(w=other), context(site)).error.reason
    assert "was replaced since" in gate.refused[-1][1]
    assert around(question(w=honest * 1.1), context(site)).has_content()


BUDGET = POLICY + "protect: {clip_norm: 1.0, noise: {noise_multiplier: 1.0}}\n"
BUDGET = BUDGET.replace(
    "budget: {ledger: site/ledger, anchor: away/anchor}", "budget: {epsilon: 8, ledger: l, anchor: a/a}"
)


def test_a_budget_holds_over_restarts_apps_runs_and_repeated_questions(tmp_path: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    sent, reasons = 0, set()
    for attempt in range(30):
        gate = Gate(policy(tmp_path, BUDGET), name=f"app-{attempt % 3}")
        outer = context(tmp_path)
        outer.run_id = 1 + attempt % 5
        reply = gate.around(app)(question(), outer)
        sent += reply.has_content()
        if reply.has_error():
            reasons.add(reply.error.reason)
    gate = Gate(policy(tmp_path, BUDGET))
    assert gate.policy.limits.spent(gate.ledger.account()) <= 8  # type: ignore[union-attr]
    assert reasons == {"The site's policy lets no reply leave: the budget is used up."}
    # analytic Gaussian at delta 1e-5: two replies of multiplier 1 are epsilon 6.6 to 7.1, three 8.5 to 9.3
    assert sent == len(gate.ledger.entries()) == 2  # type: ignore[union-attr]


def test_runs_in_turns_find_their_own_state_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def app(message: Message, context: Context) -> Message:
        calls.append(int(context.state.metric_records.get("own", {"calls": 0})["calls"]))  # type: ignore[arg-type]
        context.state["own"] = MetricRecord({"calls": calls[-1] + 1, "rest": [0] * 100})
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    def ask(run: int) -> None:
        outer = context(tmp_path)
        outer.run_id = run
        assert answered(question(), outer).has_content()

    calls = list[int]()
    answered = Gate(policy(tmp_path)).around(app)
    for run in [*range(9), *range(9)]:
        ask(run)
    assert calls == [0] * 9 + [1] * 9
    monkeypatch.setattr(gate_module, "MOST_KEPT", 2000)  # a state has some 800 bytes
    for run in (20, 21, 22, 22, 21, 20):
        ask(run)
    assert calls[18:] == [0, 0, 0, 1, 1, 0], "of too many bytes, the run that was longest without a message begins anew"


@pytest.mark.parametrize("fails", [False, True])
def test_gates_that_share_a_ledger_never_go_beyond_its_budget(fails: bool, tmp_path: Path) -> None:
    """All of them are asked at once, and an app would wait until the apps of all have been asked."""
    asked, all_asked = [], threading.Barrier(8)

    def app(message: Message, context: Context) -> Message:
        asked.append(context.run_id)
        with contextlib.suppress(threading.BrokenBarrierError):
            all_asked.wait(0.3)
        if fails:
            raise ValueError("one bit")
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    gates = [Gate(policy(tmp_path, BUDGET)) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda gate: gate(question(), context(tmp_path), app), gates))
    ledger = Gate(policy(tmp_path, BUDGET)).ledger
    assert ledger is not None
    assert len(asked) == len(ledger.entries()) == 2
    assert sum(reply.has_content() for reply in replies) == (0 if fails else 2)
    assert gates[0].policy.limits.spent(ledger.account()) <= 8
    assert {entry.outcome for entry in ledger.entries()} == {"failed" if fails else "sent"}


def test_a_day_s_rounds_hold_for_every_name_of_a_kind(tmp_path: Path) -> None:
    gate = Gate(policy(tmp_path, POLICY.replace("site/", "").replace("away/", "a/") + "rounds_per_day: 1\n"))
    asked = []

    def app(message: Message, context: Context) -> Message:
        asked.append(message.metadata.message_type)
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    for kind in ("train.default", "train", "train.default"):
        gate(question(kind=kind), context(tmp_path), app)
    message = question()
    message.metadata.__dict__["_message_type"] = "train.default.default"  # Flower refuses to make it
    with pytest.raises(ValueError, match="Invalid message type"):
        gate(message, context(tmp_path), app)
    assert asked == ["train.default"]
    assert [entry.kind for entry in gate.ledger.entries()] == ["train"]  # type: ignore[union-attr]


def test_a_ledger_that_can_not_be_written_lets_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    gate = Gate(policy(tmp_path, BUDGET))
    monkeypatch.setattr("fl_privacy.site.gate.ledger.os.fsync", full)
    reply = gate(question(), context(tmp_path), lambda m, c: Message(m.content, reply_to=m))
    assert "can't be written down" in reply.error.reason


SPACE = (64, 64)


def bits_read(tmp_path: Path, text: str, rounds: int) -> float:
    """Share of the bits of an example that a decoder reads from the weights of replies, over ``rounds`` examples."""
    gate, rng, right = Gate(policy(tmp_path, text)), np.random.default_rng(0), []
    (tmp_path / "data").mkdir(exist_ok=True)
    before = np.zeros(SPACE, np.float32)
    for _ in range(rounds):
        example = rng.bytes(2)
        (tmp_path / "data" / "example").write_bytes(example)
        reply = gate(question(w=before), context(tmp_path), apps.writing)
        change = reply.content.array_records["arrays"]["w"].numpy() - before
        bits = np.unpackbits(np.frombuffer(example, np.uint8))
        read = change.ravel().reshape(-1, len(bits)).sum(0) > 0  # the best there is: each bit in its own values
        right.append(np.mean(read == bits))
    return float(np.mean(right))


def test_weights_carry_an_example_and_noise_alone_bounds_it(tmp_path: Path) -> None:
    """16 bits over 4096 values: each has a quarter of the clip norm for itself, the noise m times the norm."""
    assert bits_read(tmp_path, POLICY.replace("site/ledger", "l0").replace("away/", "a0/"), 4) == 1.0
    rounds = 60
    for multiplier in (0.1, 1.0, 4.0):
        text = BUDGET.replace("noise_multiplier: 1.0", f"noise_multiplier: {multiplier}").replace(
            "epsilon: 8", "epsilon: 99999"
        )
        text = text.replace("ledger: l, anchor: a/a", f"ledger: l{multiplier}, anchor: a{multiplier}/a")
        read = bits_read(tmp_path, text, rounds)
        expected = 0.5 * (1 + math.erf(1 / (4 * multiplier) / math.sqrt(2)))
        assert abs(read - expected) < 5 * math.sqrt(expected * (1 - expected) / (16 * rounds)) + 0.005


@pytest.mark.long
def test_a_cell_that_hangs_dies_or_takes_too_much_is_ended_and_begun_again(cell: Cell, site: Path) -> None:
    other = Cell(f"{APP}:misbehaving", limits(site, seconds=20.0, most_bytes=2 << 30))
    gate = Gate(policy(site))
    try:
        other.start()
        assert other.held is not None
        if other.held.is_enough and other.held.processes:
            assert gate(question(5), context(site), other).has_error(), "it finds no gate to end"
        for case, reason in ((0, ""), (2, "failed"), (4, ""), (3, "failed"), (0, ""), (1, "too long")):
            other.limits = limits(site, seconds=1.0 if case == 1 else 120.0)
            reply = gate(question(case), context(site), other)
            assert reply.has_content() if not reason else reason in reply.error.reason, (case, gate.refused[-1:])
            if case == 0:
                calls = reply.content.metric_records["metrics"]["train_loss"]
        assert calls == 2.0, "what the app keeps outlives its process"
        assert other._apart is None, "who hangs is ended as who died is, and the next message starts another one"
    finally:
        other.close()


def test_an_app_that_is_not_there_is_a_line(site: Path) -> None:
    from fl_privacy.errors import UserError  # noqa: PLC0415

    for name in ("tests.gate.apps:none", "nowhere:app"):
        with pytest.raises(UserError, match="--app is expected"):
            Cell(name, limits(site)).start()


def test_what_the_kernel_gives_is_said(cell: Cell) -> None:
    assert cell.held is not None
    assert cell.held.in_words().startswith("The app is kept from the network: ")


def test_a_client_app_can_wear_the_gate_as_a_mod(site: Path) -> None:
    app = ClientApp(mods=[Gate(policy(site))])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(
            RecordDict({"arrays": message.content.array_records["arrays"], "m": ConfigRecord({})}), reply_to=message
        )

    assert app(question(), context(site)).has_content()


OLDER = """
version: 1
receives: {records: {arrays: [fitins.parameters], config: {records: [fitins.config], allow: {lr: {exact: true}}}}}
sends:
  train:
    arrays: {like: received, record: fitres.parameters}
    metrics: {records: [fitres.num_examples], allow: {num_examples: {integer: true}}}
    config: {records: [fitres.metrics, fitres.status], allow: {code: {exact: true}, message: {one_of: [Success]}}}
"""
PRUNED = "protect: {defense: pruning, rate: 0.75}"
CLIPPED = "protect: {clip_norm: 1.0, noise: {noise_multiplier: 0.01}}\nbudget: {ledger: site/older, anchor: away/older}"


class OlderClient(NumPyClient):
    """A client of Flower's older interface, which adds to each parameter the next of ``steps``."""

    def __init__(self, *steps: np.ndarray) -> None:
        self.steps = steps

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        return [a + config["lr"] * b for a, b in zip(parameters, self.steps, strict=True)], 64, {}


@pytest.mark.parametrize("protect", ["", PRUNED, CLIPPED])
def test_apps_of_the_older_interface_are_answered(protect: str, site: Path) -> None:
    rng = np.random.default_rng(3)
    before, steps = ([rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8,), ())] for _ in "ab")
    content = fitins_to_recorddict(FitIns(ndarrays_to_parameters(before), {"lr": 0.5}), keep_input=True)
    app = ClientApp(client_fn=lambda _: OlderClient(*steps).to_client())
    message = Message(content, 1, "train")
    message.metadata.__dict__["_message_id"] = "1"
    reply = Gate(policy(site, OLDER + protect)).around(app)(message, context(site))
    assert reply.has_content(), reply.error
    answer = recorddict_to_fitres(reply.content, keep_input=True)
    moved = [a - b for a, b in zip(parameters_to_ndarrays(answer.parameters), before, strict=True)]
    assert answer.num_examples == 64 and [m.dtype for m in moved] == [np.float32] * 3
    norm = math.sqrt(sum(float((m**2).sum()) for m in moved))
    if protect == CLIPPED:
        assert norm == pytest.approx(1, rel=0.2)
    elif protect == PRUNED:
        assert 0.15 <= np.mean(np.concatenate([m.ravel() != 0 for m in moved])) <= 0.3
    else:
        for one, step in zip(moved, steps, strict=True):
            np.testing.assert_allclose(one, step / 2, atol=1e-6)


def test_an_array_of_the_older_interface_is_what_its_bytes_state(site: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        held = dict(message.content.array_records["fitins.parameters"])
        held["0"] = Array(dtype="", shape=(), stype="numpy.ndarray", data=held["0"].data + b"example")
        return Message(RecordDict({"fitres.parameters": ArrayRecord(held)}), reply_to=message)

    content = fitins_to_recorddict(FitIns(ndarrays_to_parameters([np.zeros(3, np.float32)]), {}), keep_input=True)
    gate = Gate(policy(site, OLDER))
    reply = gate.around(app)(Message(content, 1, "train"), context(site))
    assert reply.has_error() and gate.refused[-1][0] == "bytes"


def test_a_defense_of_the_package_acts_on_what_leaves(site: Path) -> None:
    rng = np.random.default_rng(3)
    trained = rng.normal(size=(8, 16)).astype(np.float32)

    def app(message: Message, context: Context) -> Message:
        held = dict(message.content.array_records["arrays"].items())
        held["w"] = Array.from_numpy_ndarray(held["w"].numpy() + trained)
        return Message(RecordDict({"arrays": ArrayRecord(held)}), reply_to=message)

    gate = Gate(policy(site, POLICY + "protect: {defense: pruning, rate: 0.75}\n"))
    sent = question()
    before = sent.content.array_records["arrays"]["w"].numpy()
    after = gate.around(app)(sent, context(site)).content.array_records["arrays"]["w"].numpy()
    kept = after != before
    assert 0.15 <= kept.mean() <= 0.3
    assert np.abs(trained[kept]).min() >= np.abs(trained[~kept]).max()


@pytest.mark.parametrize(
    ("protect", "said"),
    [
        ("{defense: none_such}", "none_such"),
        ("{defense: pruning, tare: 1}", "tare"),
        ("{defense: soteria}", "expected to act on an upload"),
        ("{defense: dp_noise}", "say protect.noise"),
    ],
)
def test_a_defense_that_can_not_act_is_a_line(site: Path, protect: str, said: str) -> None:
    from fl_privacy.errors import UserError  # noqa: PLC0415

    with pytest.raises(UserError, match=said):
        Gate(policy(site, POLICY + f"protect: {protect}\n"))


def test_an_app_that_fails_to_say_something_spends_the_budget(tmp_path: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        raise ValueError("one bit")

    gate = Gate(policy(tmp_path, BUDGET))
    reasons = [gate.around(app)(question(), context(tmp_path)).error.reason for _ in range(4)]
    assert [reason.rpartition(": ")[2] for reason in reasons] == ["the app failed."] * 2 + [
        "the budget is used up."
    ] * 2


def test_whatever_fails_in_the_gate_says_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("a name of the app's")

    gate = Gate(policy(tmp_path, BUDGET))
    monkeypatch.setattr("fl_privacy.flower.gate.release", broken)
    reply = gate(question(), context(tmp_path), lambda m, c: Message(m.content, reply_to=m))
    assert reply.error.reason == "The site's policy lets no reply leave: the gate failed."
    assert [entry.outcome for entry in gate.ledger.entries()] == ["refused"]  # type: ignore[union-attr]


CONSTANT = BUDGET.replace("{integer: true, at_least: 32, round_to: 32}", "{value: 64}").replace(
    "train_loss: {digits: 3}", "train_loss: {value: 1}"
)


@pytest.mark.parametrize("broken", ["release", "_remember", "flower_records"])
def test_whatever_fails_once_the_app_is_asked_is_noise_and_counted(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def app(message: Message, context: Context) -> Message:
        asked.append(True)
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    gate = Gate(policy(tmp_path, CONSTANT))
    honest, real = gate(question(), context(tmp_path), app), getattr(gate_module, broken)
    left = [1]

    def failing(*args: Any) -> Any:
        if len(asked) > 1 and left:
            left.pop()
            raise KeyError("a name of the app's")
        return real(*args)

    monkeypatch.setattr(gate_module, broken, failing)
    reply = gate(question(), context(tmp_path), app)
    assert not left and reply.has_content()
    assert [*reply.content] == [*honest.content]
    assert reply.content.metric_records == honest.content.metric_records
    assert len(gate.ledger.entries()) == 2  # type: ignore[union-attr]
    assert "budget" in gate(question(), context(tmp_path), app).error.reason


class Odd(BaseException):
    """Ends what catches errors alone."""


@pytest.mark.parametrize(
    "error", [Odd(), RefusedError("budget", "mine"), RefusedError("ledger", "mine"), MemoryError()]
)
def test_whatever_an_app_raises_is_noise(error: BaseException, tmp_path: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        raise error

    gate = Gate(policy(tmp_path, CONSTANT))
    assert gate(question(), context(tmp_path), app).has_content()
    assert gate.refused[-1][0] == "app"
    assert [entry.outcome for entry in gate.ledger.entries()] == ["failed"]  # type: ignore[union-attr]


def test_noise_in_place_of_a_failure_takes_as_long_as_a_reply(tmp_path: Path) -> None:
    left = [1]

    def app(message: Message, context: Context) -> Message:
        if not left:
            raise ValueError("one bit")
        left.pop()
        time.sleep(0.3)
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    gate = Gate(policy(tmp_path, CONSTANT))
    for _ in range(2):
        started = time.monotonic()
        assert gate(question(), context(tmp_path), app).has_content()
        assert time.monotonic() - started >= 0.3
    assert not left


def test_noise_that_can_not_be_made_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("a name")

    gate = Gate(policy(tmp_path, CONSTANT))
    monkeypatch.setattr("fl_privacy.flower.gate.noise_alone", broken)
    assert gate(question(), context(tmp_path), lambda m, c: 1 / 0).error.reason.endswith("the app failed.")  # type: ignore[arg-type, return-value]


def test_a_reply_says_no_finer_time_than_when_it_leaves(site: Path) -> None:
    gate = Gate(policy(site, POLICY.replace("sends:", "sends:\n  every_seconds: 0.5")))
    message = question()
    for app in (lambda m, c: Message(m.content, reply_to=m), lambda m, c: 1 / 0):
        started = time.time()
        assert gate(message, context(site), app).metadata.created_at - started >= 0.5


def test_what_an_app_prints_moves_no_cursor(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = Cell("tests.gate.apps:printing", limits(site, most_bytes=LEAST_MEMORY << 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
        other.start()
    try:
        assert Gate(policy(site))(question(), context(site), other).has_content()
        deadline = time.monotonic() + 10
        said = ""
        while "app: on standard error" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.1)
        assert "app: on standard output" in said
        assert "\x1b" not in said
    finally:
        other.close()
