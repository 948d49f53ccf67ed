"""What a node keeps for its client outlives the node's process, is nobody else's, and no round is answered twice."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict, UserConfig as RunConfig

from fl_privacy.cli import flower_app
from fl_privacy.cli.flower_app import client_app, make_client
from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.federation import public_state
from fl_privacy.flower import LocalGrid
from fl_privacy.flower._node_memory import NodeMemory, kept_secret, node_memory
from fl_privacy.flower.grids import FIRST_NODE
from fl_privacy.flower.records import CONFIG, ROUND, state_records
from fl_privacy.site.gate.ledger import Ledger

OVERRIDES = (
    "model=lenet federation=fedavg federation.clients=50 federation.rounds=9 federation.plan.batch_size=40"
    " defense=spn attack=none baseline=false"
)
STATE = ClientState({"spn/head": torch.arange(6.0).view(2, 3), "count": torch.tensor(3)})
KEY, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FL_PRIVACY_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FL_PRIVACY_SIMULATION", raising=False)
    return tmp_path / "state"


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_it_comes_back_as_it_was_and_for_its_owner_alone(tmp_path: Path, key: bytes | None) -> None:
    path = tmp_path / "folder" / "client.state"
    NodeMemory(path, key).save(STATE, after=("train", 4))

    found = NodeMemory(path, key).load()

    assert found.tensors.keys() == STATE.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in STATE.tensors.items())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (STATE.tensors["spn/head"].numpy().tobytes() in path.read_bytes()) is (key is None)
    assert NodeMemory(tmp_path / "none").load().tensors == {}


def test_every_folder_that_is_made_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "there").mkdir(mode=0o755)
        NodeMemory(tmp_path / "there" / "state" / "run-1" / "client.state").save(STATE)
        kept_secret(tmp_path / "there" / "other" / "state" / "node-secret")
        Ledger(tmp_path / "there" / "site" / "ledger" / "ledger", tmp_path / "there" / "anchors" / "anchor").account()
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "there").rglob("*") if path.is_dir()]
    assert len(made) == 7 and {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o755, "what is there stays as it is"


def opened(path: Path) -> None:
    path.chmod(0o640)


def swapped(path: Path) -> None:
    """Replace a node's file by that of another client, sealed with the same key."""
    other = path.with_name("other.state")
    NodeMemory(other, KEY).save(STATE)
    other.replace(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def kept(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("written", "change", "read", "message"),
    [
        (None, opened, None, "others own or read it"),
        (None, cut, None, "to hold what a client keeps"),
        (None, kept, KEY, "expected to be encrypted, but is not"),
        (KEY, kept, None, "is expected with its key"),
        (KEY, kept, OTHER, "encrypted by the given key, but is not"),
        (KEY, cut, KEY, "encrypted by the given key, but is not"),
        (KEY, swapped, KEY, "encrypted by the given key, but is not"),
    ],
)
def test_what_is_not_its_own_is_refused(
    tmp_path: Path, written: bytes | None, change: Callable[[Path], None], read: bytes | None, message: str
) -> None:
    path = tmp_path / "client.state"
    NodeMemory(path, written).save(STATE)
    change(path)

    with pytest.raises(UserError, match=message):
        NodeMemory(path, read).load()


def test_no_round_is_answered_twice_also_by_a_node_that_restarted(tmp_path: Path) -> None:
    path = tmp_path / "client.state"
    NodeMemory(path).save(STATE, after=("train", 4))
    NodeMemory(path).save(STATE, after=("personalize", 4))
    NodeMemory(path).save(STATE)
    again = NodeMemory(path)

    again.expect_new("train", 5)
    for round in (4, 3):
        with pytest.raises(UserError, match=f"a round after 4 is expected, but got one of round {round}"):
            again.expect_new("train", round)


def test_the_secret_of_a_node_with_a_key_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "node-secret"
    secret = kept_secret(path, KEY)

    assert kept_secret(path, KEY).bytes_of("x", 8) == secret.bytes_of("x", 8)
    with pytest.raises(UserError, match="expected with its key, but none is given; set FL_PRIVACY_KEY"):
        kept_secret(path)


def node(**config: str | int) -> Context:
    """Make a node that has just started."""
    return Context(
        run_id=7,
        node_id=FIRST_NODE,
        node_config=RunConfig({"partition-id": 3, "num-partitions": 50, **config}),
        state=RecordDict(),
        run_config=RunConfig({"overrides": OVERRIDES}),
    )


def ask(context: Context, round: int) -> Message:
    wrapped = make_client(context).wrapped
    grid = LocalGrid([0], client_app)
    grid.contexts = {FIRST_NODE: context}
    records = state_records(public_state(wrapped.model, wrapped.defense))
    content = RecordDict({**records, CONFIG: ConfigRecord({ROUND: round})})
    (reply,) = grid.send_and_receive([Message(content, FIRST_NODE, "train")])
    return reply


def said_in(reply: Message) -> dict[str, bytes]:
    return {name: a.data for record in reply.content.array_records.values() for name, a in record.items()}


def test_a_node_that_restarts_goes_on_where_it_was_and_repeats_its_answer(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    first = node(**{"fl-privacy-key": str(key)})
    answered = ask(first, 1)
    left = node_memory(first).load().tensors
    restarted = node(**{"fl-privacy-key": str(key)})

    replayed = ask(restarted, 1)
    unchanged = node_memory(restarted).load().tensors
    assert ask(restarted, 2).has_content()
    trained = node_memory(restarted).load().tensors

    assert said_in(replayed) == said_in(answered)
    assert "it was answered before" in (ask(restarted, 1).error.reason or "")
    assert all(torch.equal(unchanged[name], tensor) for name, tensor in left.items())
    assert any(not torch.equal(trained[name], tensor) for name, tensor in left.items())
    assert not first.state.array_records, "what is private is not in Flower's context"
    assert not list(folder.rglob("*.part"))


def test_a_run_is_composed_once_in_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = []
    compose = flower_app.compose_run
    monkeypatch.setattr(flower_app, "compose_run", lambda overrides: (composed.append(1), compose(overrides))[1])
    flower_app._composed.cache_clear()

    for round in (1, 2, 3):
        assert ask(node(), round).has_content()

    assert len(composed) == 1
