"""``fl-privacy policy``, ``supernode --policy`` and ``deploy --policy``, as a user calls them."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from fl_privacy.cli.main import run_command_line
from fl_privacy.cli.node_worker import gated_app
from fl_privacy.flower.inside.identity import identity_put_back
from fl_privacy.site.deploy import write_deployment
from fl_privacy.site.gate.ledger import Ledger
from fl_privacy.site.gate.policy import READY, read_policy
from fl_privacy.site.gate.sentences import replies_within
from tests.gate.test_policy import SPEC

EXAMPLE = SPEC.replace("/var/lib/fl-privacy/ledger", "ledger/ledger")

APP = """
[project]
name = "small"
version = "1"
[tool.flwr.app]
publisher = "someone"
[tool.flwr.app.components]
serverapp = "small_policy_app:server"
clientapp = "small_policy_app:client"
[tool.flwr.app.config]
num-server-rounds = 1
"""

CODE = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client, server = ClientApp(), ServerApp()

@client.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"num-examples": 100, "train_loss": 0.123456789, "secret": 0.5})
    return Message(RecordDict({"arrays": ArrayRecord([w + 1]), "metrics": metrics}), reply_to=message)

@client.evaluate()
def evaluate(message, context):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 100, "accuracy": 0.98712})}), reply_to=message)

@server.main()
def main(grid, context):
    FedAvg().start(grid=grid, initial_arrays=ArrayRecord([np.zeros(4, np.float32)]),
        num_rounds=context.run_config["num-server-rounds"])
"""

TRIED = """
version: 1
receives: {records: {arrays: [arrays], config: {allow: [server-round]}}, guard: off}
sends:
  unnamed: UNNAMED
  train:
    arrays: {like: received}
    metrics: {allow: {num-examples: {integer: true, at_least: 32, round_to: 32}, train_loss: {digits: 3}}}
  evaluate: {metrics: {allow: {num-examples: {integer: true}, accuracy: {digits: 2}}}}
budget: {ledger: ledger/ledger, anchor: anchor/anchor}
"""


def written(folder: Path, text: str) -> Path:
    place = folder / "site.yaml"
    place.write_text(text)
    place.chmod(0o600)
    return place


@pytest.mark.parametrize("name", READY)
def test_ready_policies_are_said_in_sentences(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["policy", "check", name]) == 0
    said = capsys.readouterr().out.splitlines()
    assert all(line.endswith(".") for line in said if line)
    assert said[0].startswith("Open: Nothing bounds what the weights carry") == (name != "dp")


def test_the_ready_policy_of_differential_privacy_lets_out_what_its_comment_says() -> None:
    assert 50 <= replies_within(read_policy("dp")) <= 60


def test_a_ready_policy_is_a_file_to_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["policy", "show", "strict"]) == 0
    assert read_policy(written(tmp_path, capsys.readouterr().out)).bare


def test_an_exponent_is_a_number(tmp_path: Path) -> None:
    policy = read_policy(written(tmp_path, EXAMPLE))
    assert policy.limits.delta == 1e-5
    assert policy.receives.arrays == ("parameters",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("version: 1", "version: 2"), "version"),
        (("finite: true,", "finite: true, counters: sent,"), "counters is expected to be received"),
        (("rounds_per_day: 50", "rounds_per_day: 50\nrounds_per_day: 5000"), "stands twice"),
        (("query: refuse", "query: refuse\n  train: {arrays: {like: received}}"), "stands twice"),
        (("lr, epochs", "&a lr, *a"), "aliases are not read"),
        (("noise_multiplier: 1.1", "noise_multiplier: .nan"), "noise_multiplier"),
        (("query: refuse", "query: refuse\n  qurey: {}"), "qurey"),
        (("rounds_per_day: 50", "rounds_per_day: 50\napp: {reads: [ledger]}"), "away from what the app reads"),
        (("rounds_per_day: 50", "rounds_per_day: 50\napp: {writes: [.]}"), "away from what the app reads"),
    ],
)
def test_a_wrong_policy_is_a_line(
    change: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert change[0] in EXAMPLE
    assert run_command_line(["policy", "check", str(written(tmp_path, EXAMPLE.replace(*change)))]) == 2
    found = capsys.readouterr()
    assert said in " ".join(found.err.split())
    assert "Traceback" not in found.err


def test_the_ledger_is_shown_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = written(tmp_path, EXAMPLE.replace("ledger/ledger}", "ledger/ledger, anchor: anchor/anchor}"))
    assert run_command_line(["policy", "show-ledger", str(place)]) == 0
    assert "nothing has left" in capsys.readouterr().out
    assert not (tmp_path / "ledger").exists()
    budget = read_policy(place).budget
    assert budget is not None
    ledger = Ledger(budget.ledger, budget.anchor)
    ledger.append(kind="train", outcome="sent", rho=0.4132, run="7", app="a:b", policy="p")
    with budget.ledger.open("ab") as file:
        file.write(b'{"number":2,')
    assert run_command_line(["policy", "show-ledger", str(place)]) == 2
    assert "--mend" in capsys.readouterr().err
    assert run_command_line(["policy", "show-ledger", str(place), "--mend"]) == 0
    said = capsys.readouterr().out
    assert "2 entries, 2 replies left" in said
    assert "of 8 at delta 1e-05" in said


def test_a_policy_is_tried_on_an_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text(APP)
    moved = "from flwr.client.typing import ClientAppCallable, Mod\n"  # as apps for an earlier Flower do
    (tmp_path / "app" / "small_policy_app.py").write_text(moved + CODE)
    for unnamed in ("refuse", "drop"):
        place = written(tmp_path, TRIED.replace("UNNAMED", unnamed))
        arguments = ["policy", "try", str(place), str(tmp_path / "app"), "--nodes", "2", "--rounds", "2"]
        assert run_command_line(arguments) == 0
        said = capsys.readouterr().out
        assert "Without the gate 8 replies left." in said
        if unnamed == "refuse":
            assert "Refused 4 times, since there is a key that the policy does not name" in said
            assert "'secret'" in said
        else:
            assert "Left out of 4 replies: train: metrics/secret" in said
            assert "Nothing was refused." in said
            assert "accuracy (clients' evaluation): 0.9871 without, 0.99 with" in said
    assert not (tmp_path / "ledger").exists(), "a trial spends nothing"


def test_an_app_answers_in_another_process_behind_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    place = written(tmp_path, TRIED.replace("UNNAMED", "refuse") + "app: {isolation: where_possible}\n")
    with identity_put_back():
        answer = gated_app("tests.gate.apps:honest", str(place))
        content = {"arrays": ArrayRecord({"w": Array.from_numpy_ndarray(np.zeros(4, np.float32))})}
        message = Message(RecordDict(content), 1, "train")  # type: ignore[arg-type]
        message.metadata.__dict__["_message_id"] = "1"
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        reply = answer(message, context)
    assert reply.content.array_records["arrays"]["w"].numpy().tolist() == [1.0] * 4
    budget = read_policy(place).budget
    assert budget is not None
    (entry,) = Ledger(budget.ledger, budget.anchor).entries()
    assert (entry.kind, entry.outcome, entry.rho, entry.app) == ("train", "sent", None, "tests.gate.apps:honest")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "nowhere.yaml"], "nowhere.yaml is expected to be a file"),
        (["--policy", "site.yaml", "--auth-supernode-private-key", "data/node.key"], "away from what the app reads"),
        (["--policy", "site.yaml", "--auth-supernode-pr=data/node.key"], "away from what the app reads"),
        (["--policy", "site.yaml", "--isol", "subprocess"], "sets --isolation itself"),
        (["--policy", "data/site.yaml"], "away from what the app reads"),
        (["--policy", "site.yaml", "--app", "only_here:app"], "no only_here"),
        (["--policy", "site.yaml"], "add --app package.client_app:app"),
    ],
)
def test_a_node_that_could_not_keep_its_app_apart_does_not_start(
    more: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "node.key").write_text("key")
    (tmp_path / "only_here.py").write_text("app = print")
    text = EXAMPLE + "app: {reads: [FOLDER]}\n".replace("FOLDER", str(tmp_path / "data"))
    written(tmp_path, text)
    written(tmp_path / "data", text)
    assert run_command_line(["supernode", "--insecure", *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_deployment_has_a_policy_for_each_node_that_is_kept(tmp_path: Path) -> None:
    write_deployment(tmp_path / "out", nodes=2, host="localhost", port=8000, policy="dp")
    places = [tmp_path / "out" / f"node-{number}" / "site.yaml" for number in range(2)]
    policies = [read_policy(place) for place in places]
    assert [policy.app.reads for policy in policies] == [(place.parent / "data",) for place in places]
    assert all(
        policy.budget and policy.budget.ledger == p.parent / "ledger/ledger"
        for policy, p in zip(policies, places, strict=True)
    )
    places[0].write_text(EXAMPLE)
    write_deployment(tmp_path / "out", nodes=2, host="localhost", port=8000, policy="strict")
    assert places[0].read_text() == EXAMPLE
    assert "--policy site.yaml" in (places[1].parent / "start.sh").read_text()
