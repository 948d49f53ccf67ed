"""Bundles that runs bring: who lets them in, what they find, and what is written down."""

import base64
import hashlib
import io
import json
import logging
import os
import pwd
import py_compile
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign
from flwr.supernode import start_client_internal as flower_node

from fl_privacy.cli import isolated_app
from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError
from fl_privacy.flower import app_process
from fl_privacy.flower.app_process import Bundles, Cell
from fl_privacy.flower.gate import Gate
from fl_privacy.flower.inside import supernode
from fl_privacy.flower.inside.identity import TURN, identify_process, identity_put_back, others_turn
from fl_privacy.flower.inside.serialized import message_bytes, message_of
from fl_privacy.flower.inside.supernode import Brought
from fl_privacy.site.gate import bundles
from fl_privacy.site.gate.bundles import (
    MOST_WAITING,
    REVOKED,
    Approvals,
    Bundle,
    Runs,
    read_bundle,
    signers_of,
    unmet_packages,
)
from fl_privacy.site.gate.isolation import Isolation
from fl_privacy.site.gate.policy import parse_policy
from fl_privacy.site.gate.rules import RefusedError
from fl_privacy.site.gate.sentences import rules_in_words, warnings_of

PROJECT = """
[project]
name = "{name}"
version = "1.2.0"
dependencies = {packages}
{more}
[tool.flwr.app]
publisher = "someone"
[tool.flwr.app.components]
serverapp = "brought_app:server"
clientapp = "brought_app:client"
"""
CLIENT = """
import os
from pathlib import Path
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

client, calls = ClientApp(), []

@client.train()
def train(message, context):
    calls.append(1)
    arrays = {k: a.numpy() + 1 for k, a in message.content["arrays"].items()}
    metrics = {"num-examples": 64, "train_loss": 0.125, "calls": len(calls), "kept": STEP}
    arrays = ArrayRecord({k: Array.from_numpy_ndarray(a) for k, a in arrays.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=message)
"""
POLICY = """
version: 1
receives: {records: {arrays: [arrays]}, guard: off}
sends:
  train:
    arrays: {like: received}
    metrics: {allow: {num-examples: {integer: true}, train_loss: {digits: 3}, calls: {integer: true}, kept: {}}}
budget: {ledger: site/ledger, anchor: away/anchor}
"""
SIGNED_AT = 1_700_000_000


def fab(
    code: str = CLIENT.replace("STEP", "0"), name: str = "honest", packages: str = "[]", more: str = "", again: str = ""
) -> bytes:
    """Make a bundle as `flwr build` does, of one module, which is there a second time as ``again``."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("pyproject.toml", PROJECT.format(name=name, packages=packages, more=more))
        for place in filter(None, ("brought_app.py", again)):
            archive.writestr(place, code)
    return made.getvalue()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def identified() -> Iterator[None]:
    with identity_put_back():
        identify_process()
        yield


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir(mode=0o700)
    return tmp_path


def written(site: Path, runs: str, more: str = "") -> Path:
    place = site / "site.yaml"
    place.write_text(f"{POLICY}runs: {runs}\n{more}")
    place.chmod(0o600)
    return place


def leaving_every(site: Path, seconds: float) -> Path:
    place = written(site, f"{{allow: [{{fab: {digest(fab())}}}]}}")
    place.write_text(place.read_text().replace("sends:", f"sends:\n  every_seconds: {seconds}"))
    return place


def gate_of(site: Path, runs: str, more: str = "") -> Gate:
    return Gate(written(site, runs, more))


def question(run: int = 1) -> tuple[Message, Context]:
    arrays = ArrayRecord({"w": Array.from_numpy_ndarray(np.arange(6, dtype=np.float32))})
    made = message_of(message_bytes(Message(RecordDict({"arrays": arrays}), 1, "train")))
    made.metadata.__dict__["_message_id"] = str(run)
    return made, Context(run, 1, {}, RecordDict(), {"lr": 0.1})


def approvals(folder: Path, **told: Any) -> Approvals:
    return Approvals(Runs(folder=folder / "runs", **told))


def admitted(
    one: Approvals, bundle: Bundle, run: str = "7", signers: tuple[str, ...] = (), **config: Any
) -> str | None:
    return one.admit(bundle, run, config, signers)


BROKEN = {
    "no archive": b"PK",
    "no project": b"PK\x05\x06" + bytes(18),
    "other letters": fab(name="a b"),
    "no list of texts": fab(packages="[1]"),
    "no TOML": fab(more="["),
    "a large project": fab(more=f'note = "{"x" * (1 << 20)}"'),
    "two projects": fab(again="./pyproject.toml"),
    "two files of one name": fab(again="/brought_app.py"),
    "many packages": fab(packages=str(["numpy"] * 501)),
    "many extras": fab(packages=str([f"numpy[{','.join(f'e{n}' for n in range(3000))}]"])),
    "a text of packages": fab(packages='"numpy"'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_bundle_is_refused(case: str) -> None:
    with pytest.raises(RefusedError) as refused:
        read_bundle(BROKEN[case])
    assert refused.value.reason == "bundle"


def test_packages_beyond_what_is_installed_are_named() -> None:
    wanted = ["flwr==0.1", "numpy>=1", "numpy<1", "no-such-thing>=2", "cryptography; python_version < '3'", "x y"]
    bundle = read_bundle(fab(packages=str(wanted), more='requires-python = ">=3.90"'))
    assert bundle.name == "someone/honest"
    found = unmet_packages(bundle)
    assert list(found) == ["Python >=3.90", "numpy<1", "no-such-thing>=2", "x y"]
    assert "is installed" in found["numpy<1"] and found["no-such-thing>=2"] == "not installed"
    assert "numpy<1" not in unmet_packages(bundle, any_version=True)
    long = f"no-{'x' * 200}"
    odd = [f"{long}; python_version > '3'", "numpy; python_version ~= 'x'", f"numpy; {'(' * 2000}"]
    found = unmet_packages(read_bundle(fab(packages=str(odd))))
    assert found == {long: "not installed", odd[1]: "no requirement", odd[2]: "no requirement"}, "whole, as pip gets it"


def test_packages_of_an_extra_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "there-1.0.dist-info"
    about.mkdir()
    needs = "Requires-Dist: no-such-thing; extra == 'more'\nRequires-Dist: there[more]; extra == 'all'\n"
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: there\nVersion: 1.0\n{needs}")
    monkeypatch.syspath_prepend(tmp_path)
    for text, missing in (("there", []), ("there[more]", ["no-such-thing"]), ("there[all]", ["no-such-thing"])):
        found = unmet_packages(read_bundle(fab(packages=f'["{text}"]')))
        assert list(found) == missing, "without the marker, by which pip would install nothing"


def test_a_site_s_index_is_not_named_to_others_and_another_node_may_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise subprocess.CalledProcessError(1, ["/site/python"], stderr="Looking in: https://user:word@index.site")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(RefusedError) as refused:
        bundles.install_packages({"a": "not installed"}, tmp_path / "packages")
    assert "index.site" in caplog.text and not {"index.site", "/site"} & set(str(refused.value).split())

    def installs(arguments: list[str], work: str) -> str:
        if "--target" in arguments:
            (tmp_path / "other" / "here").mkdir(parents=True)
            (tmp_path / "other").rename(Path(work).parent / name)
            (Path(arguments[2]) / "mine").touch()
        return '{"install": [{"metadata": {"name": "a", "version": "1"}}]}'

    monkeypatch.setattr(bundles, "_pip", installs)
    told = json.dumps([["a"], sys.version]).encode()
    name = digest(told)[:32]
    assert (bundles.install_packages({"a": "not installed"}, tmp_path / "packages") / "here").exists()


def test_a_module_s_compiled_form_is_not_run_in_place_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("client = 'unseen'\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(tmp_path / "evil.py"), str(tmp_path / "evil.pyc"), invalidation_mode=unchecked)
    made = io.BytesIO(fab("client = 'reviewed'\n"))
    with zipfile.ZipFile(made, "a") as archive:
        archive.write(tmp_path / "evil.pyc", f"__pycache__/brought_app.{sys.implementation.cache_tag}.pyc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "brought_app", raising=False)
    try:
        assert isolated_app._loaded("brought_app:client", [made.getvalue()], []) == "reviewed"
    finally:
        sys.modules.pop("brought_app", None)


def test_a_signature_holds_for_one_bundle_and_one_key() -> None:
    keys = {name: ed25519.Ed25519PrivateKey.generate() for name in ("alice", "bob")}
    public = {
        name: key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        for name, key in keys.items()
    }
    content, other = fab(), fab(name="other")

    def signed(by: str, what: bytes, at: Any = SIGNED_AT) -> str:
        message = create_message_to_sign(hashlib.sha256(what).digest(), SIGNED_AT)
        text = base64.urlsafe_b64encode(keys[by].sign(message)).rstrip(b"=").decode()
        return json.dumps({"signature": text, "signed_at": at})

    def signers(**verifications: str) -> list[str]:
        brought = Brought.of(Fab(digest(content), content, verifications))
        return signers_of(read_bundle(content), brought.signatures, public)

    assert signers(fpk_1=signed("alice", content), valid_license="Valid") == ["alice"]
    assert signers(one=signed("bob", content), two=signed("alice", content)) == ["alice", "bob"]
    assert signers(fpk_1=signed("alice", other)) == []
    assert signers(fpk_1=signed("alice", content, at=SIGNED_AT + 1)) == []
    assert (
        signers(a="{}", b="[]", c="5", d='{"signature": 5, "signed_at": "x"}', e='{"signature": "%", "signed_at": 1}')
        == []
    )


def test_runs_are_let_in_by_bundle_key_or_name(tmp_path: Path) -> None:
    bundle = read_bundle(fab())
    by_fab = approvals(tmp_path, allow=({"fab": bundle.digest},))
    assert admitted(by_fab, bundle) == "allow: fab"
    by_key = approvals(tmp_path, allow=({"key": "alice"},), keys={"alice": "", "bob": ""})
    assert admitted(by_key, bundle, signers=("bob", "alice")) == "allow: key alice"
    by_name = approvals(tmp_path, allow=({"version": "1.2.0", "app": "someone/honest"},))
    assert admitted(by_name, bundle) == "allow: app"
    for one, other in ((by_fab, read_bundle(fab(name="b"))), (by_key, bundle), (by_name, read_bundle(fab(name="c")))):
        with pytest.raises(RefusedError, match="not on the site's list"):
            admitted(one, other, signers=("bob",))
    assert not (tmp_path / "runs").exists()


def test_a_run_waits_until_the_site_decides_on_its_bundle_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, one = read_bundle(fab(packages='["no-such-thing"]')), approvals(tmp_path, approve="each run")
    assert admitted(one, bundle, lr=1) is None and admitted(one, bundle, lr=1) is None
    (waiting,) = one.waiting()
    assert waiting.config == {"lr": 1} and waiting.unmet == {"no-such-thing": "not installed"}
    assert oct(one.place("7", f"{bundle.digest}.fab").stat().st_mode)[-3:] == "600"
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    one.decide("7", "yes", waiting.token)
    assert not one.waiting()
    assert admitted(one, bundle, lr=1) == f"user {os.getuid()}", "a container's user has no name"
    monkeypatch.undo()
    one.decide("7", "yes", waiting.token)
    monkeypatch.setenv("LOGNAME", "somebody")
    assert admitted(one, bundle, lr=1) == pwd.getpwuid(os.getuid()).pw_name
    one.place("7", "decision").rename(one.place("8", "decision"))
    assert admitted(one, bundle, run="8", lr=1) is None, "another run is another question"
    assert admitted(one, bundle, lr=2) is None, "another configuration is another question"
    assert admitted(one, read_bundle(fab(name="other")), lr=1) is None, "so is another bundle"
    one.decide("7", "no", next(each.token for each in one.waiting() if each.run == "7"))
    with pytest.raises(RefusedError, match="was refused"):
        admitted(one, read_bundle(fab(name="other")), lr=1)
    one.place("7", "decision").chmod(0o666)
    with pytest.raises(UserError, match="chmod go-w it"):  # anybody could have written it
        admitted(one, bundle, lr=1)


def test_a_run_that_was_let_in_is_refused_once_it_is_revoked(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = read_bundle(fab())
    policy = gate_of(site, f"{{allow: [{{fab: {bundle.digest}}}], approve: others}}").policy
    assert policy.runs is not None
    gate = Approvals(policy.runs)
    assert admitted(gate, bundle) == "allow: fab", "by its policy"
    other = read_bundle(fab(name="other"))
    assert admitted(gate, other, run="8") is None
    gate.decide("8", "yes", token := gate.waiting()[0].token)
    assert admitted(gate, other, run="8"), "by a person"
    for run in ("7", "8"):
        assert run_command_line(["policy", "approve", str(site / "site.yaml"), run, "--revoke"]) == 0
        assert f"Run {run} is revoked" in capsys.readouterr().out
    for brought, run in ((bundle, "7"), (other, "8"), (other, "7")):
        with pytest.raises(RefusedError, match="was revoked"):
            admitted(gate, brought, run=run)
    assert admitted(gate, bundle, run="9") == "allow: fab", "other runs go on"
    with pytest.raises(RefusedError, match="was revoked"):
        gate.decide("8", "yes", token)  # by a person who still reviews it
    assert run_command_line(["policy", "approve", str(site / "site.yaml"), "10", "--revoke"]) == 0
    assert "no message of it so far: check" in capsys.readouterr().out
    assert run_command_line(["policy", "approve", str(site / "site.yaml"), "08", "--revoke"]) == 2
    gate.place("8", "decision").write_text("{")
    with pytest.raises(UserError, match="can't be read"):
        admitted(gate, other, run="8")
    assert run_command_line(["policy", "approve", str(site / "site.yaml"), "../7", "--revoke"]) == 2
    assert run_command_line(["policy", "approve", str(site / "site.yaml"), "--revoke"]) == 2
    assert run_command_line(["policy", "approve", str(site / "site.yaml"), "7", "--revoke", "--yes"]) == 2


def test_each_run_waits_of_those_that_are_allowed(tmp_path: Path) -> None:
    bundle = read_bundle(fab())
    each = approvals(tmp_path, allow=({"fab": bundle.digest},), approve="each run")
    assert admitted(each, bundle) is None
    with pytest.raises(RefusedError):
        admitted(each, read_bundle(fab(name="other")))
    others = approvals(tmp_path, allow=({"fab": bundle.digest},), approve="others")
    assert admitted(others, bundle) == "allow: fab"
    assert admitted(others, read_bundle(fab(name="other")), run="8") is None


def test_the_number_of_runs_that_wait_is_bounded(tmp_path: Path) -> None:
    bundle, one = read_bundle(fab()), approvals(tmp_path, approve="others")
    assert [admitted(one, bundle, run=str(number)) for number in range(MOST_WAITING)] == [None] * MOST_WAITING
    with pytest.raises(RefusedError, match="others do"):
        admitted(one, bundle, run="99")
    one.forget("3")
    with pytest.raises(RefusedError, match="bytes of settings; keep at most"):
        admitted(one, bundle, run="99", note="x" * (1 << 17))
    with pytest.raises(UserError, match="number of a run"):
        one.place("../7", "fab")


def test_runs_that_ended_with_a_node_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, one = read_bundle(fab()), approvals(tmp_path, approve="others", wait_seconds=50)
    for number in range(MOST_WAITING):
        assert admitted(one, bundle, run=str(number)) is None
    now = time.time()
    monkeypatch.setattr(bundles.time, "time", lambda: now + 60)
    assert admitted(one, bundle, run="99") is None
    assert [each.run for each in one.waiting()] == ["99"] and len(list(one.runs.folder.iterdir())) == 2


def test_a_decision_between_two_looks_at_the_folder_harms_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, one, own = read_bundle(fab()), approvals(tmp_path, approve="others"), bundles._own
    assert admitted(one, bundle) is None and admitted(one, bundle, run="8") is None

    def decided_meanwhile(place: Path) -> dict[str, Any]:
        if place.suffix == ".json":
            one.forget("7")
        return own(place)

    monkeypatch.setattr(bundles, "_own", decided_meanwhile)
    assert [each.run for each in one.waiting()] == ["8"]
    assert admitted(one, bundle) is None


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ("{allow: [{fab: abc}]}", "64 letters of a SHA-256"),
        ("{allow: [{key: alice}]}", "runs.allow.key"),
        ("{allow: [{app: a/b}]}", "runs.allow is expected to list"),
        ("{allow: [{version: '1'}]}", "runs.allow is expected to list"),
        ("{allow: [{app: a/b, version: 1.0}]}", "quotes make a number a text"),
        ("{keys: {alice: ssh-rsa AAAA}}", "ssh-ed25519"),
        ("{approve: sometimes}", "runs.approve"),
        ("{install: pip}", "runs.install"),
        ("{wait_seconds: 0}", "runs.wait_seconds"),
        ("{}\napp: {isolation: where_possible}", "app.isolation is expected to be"),
        ("{folder: data/runs}\napp: {reads: [data]}", "runs.folder is expected to be away from what the app reads"),
    ],
)
def test_a_wrong_rule_on_runs_is_one_line(runs: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as error:
        parse_policy(f"{POLICY}runs: {runs}\n".encode(), "site.yaml", tmp_path)
    assert "\n" not in str(error.value)


def test_a_hash_that_begins_like_a_number_is_none(tmp_path: Path) -> None:
    told = "41e3289f" * 8
    policy = parse_policy(f"{POLICY}runs: {{allow: [{{fab: {told}}}]}}\n".encode(), "site.yaml", tmp_path)
    assert policy.runs is not None and policy.runs.allow == ({"fab": told},)


def test_runs_need_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="runs is expected with a budget"):
        parse_policy(b"version: 1\nsends: {}\nruns: {}\n", "site.yaml", tmp_path)


def test_rules_on_runs_are_said_in_sentences(tmp_path: Path) -> None:
    runs = "{allow: [{app: a/b, version: '1'}], approve: others, install: from-index, versions: any, wait_seconds: 60}"
    policy = parse_policy(f"{POLICY}runs: {runs}\n".encode(), "site.yaml", tmp_path)
    said = " ".join(rules_in_words(policy))
    assert "allowed are bundles that say they are a/b 1." in said
    assert "A run of another app waits until" in said and "more than 60 s is refused" in said
    assert any("states its name and version itself" in each for each in warnings_of(policy))
    each = parse_policy(f"{POLICY}runs: {{approve: each run}}\n".encode(), "site.yaml", tmp_path)
    assert "Each run waits until `fl-privacy policy approve` says yes or no." in rules_in_words(each)


def test_a_site_sees_a_review_and_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(written(tmp_path, "{approve: others}"))
    one = Approvals(Gate(place).policy.runs or Runs())
    made = io.BytesIO(fab(CLIENT.replace("STEP", "0") + "\nimport requests\n", packages='["no-such-thing"]'))
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("brought_app.so", "")
    bundle = read_bundle(made.getvalue())
    for run in ("7", "8"):
        assert admitted(one, bundle, run=run, note="\x1b[2Jx" + " " * 300 + "end") is None
    assert run_command_line(["policy", "approve", place]) == 0
    said = capsys.readouterr().out
    assert "2 runs wait." in said and bundle.digest in said
    assert run_command_line(["policy", "approve", place, "7", "--yes"]) == 0
    said = capsys.readouterr().out
    assert "train" in said and "requests" in said and "no-such-thing: not installed" in said and "\x1b" not in said
    assert " end'" in said and "brought_app.so, pyproject.toml." in said, "all of the configuration and all files"
    assert "Run 7 is approved." in said
    one.place("8", f"{bundle.digest}.fab").write_bytes(b"what no review can read")
    assert run_command_line(["policy", "approve", place, "8", "--yes"]) == 2
    assert run_command_line(["policy", "approve", place, "8", "--refuse"]) == 0
    assert admitted(one, bundle, run="7", note="\x1b[2Jx" + " " * 300 + "end")
    with pytest.raises(RefusedError):
        admitted(one, bundle, run="8", note="\x1b[2Jx" + " " * 300 + "end")
    capsys.readouterr()
    for arguments, wrong in ((["9"], "a run that waits"), (["8", "--yes", "--refuse"], "got several")):
        assert run_command_line(["policy", "approve", place, *arguments]) != 0
        assert wrong in capsys.readouterr().err


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the process that only finds out whether this system isolates."""
    start = Cell.open
    monkeypatch.setattr(Cell, "open", lambda cell: start(cell) if cell.app else Isolation())


def asked(bundles: Bundles, content: bytes, run: int = 1, number: str = "") -> Message | None:
    message, context = question(run)
    message.metadata.__dict__["_message_id"] = number or str(run)
    return bundles.answer(message, context, Brought(content, ()))


@pytest.mark.usefixtures("unprobed")
def test_a_run_that_is_not_approved_gets_one_line_and_one_entry(site: Path) -> None:
    gate = gate_of(site, f"{{allow: [{{fab: {digest(fab())}}}]}}")
    bundles, other = Bundles(gate), fab(name="other")
    for _ in range(3):
        reply = asked(bundles, other)
        assert reply is not None and reply.has_error()
        said = reply.error.reason
        assert "\n" not in said and "this site has not approved the run (run 1 of someone/other 1.2.0" in said
    broken = asked(bundles, b"PK", 2)
    assert broken is not None and "the run's bundle is no Flower app" in broken.error.reason
    (first, second) = gate.ledger.entries()  # type: ignore[union-attr]
    assert (first.kind, first.outcome, first.fab, first.app) == ("run", "refused", digest(other), "someone/other 1.2.0")
    assert second.run == "2"
    again = Bundles(Gate(site / "site.yaml"))
    asked(again, other)
    assert len(gate.ledger.entries()) == 2, "nor is one made after a restart"  # type: ignore[union-attr]


@pytest.mark.usefixtures("unprobed")
def test_a_failure_of_the_site_is_not_described_to_others(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundles = Bundles(gate_of(site, "{approve: others}"))
    (site / "site" / "runs").write_text("no folder")
    with (site / "site" / "ledger").open("ab") as ledger:
        ledger.write(b"torn")
    for content in (fab(), b"PK"):  # the second is refused, and the ledger can't say so
        reply = asked(bundles, content)
        assert reply is not None and str(site) not in reply.error.reason
    assert str(site / "site" / "runs") in caplog.text and "is not in the ledger" in caplog.text


@pytest.mark.usefixtures("unprobed")
def test_so_many_messages_of_a_run_wait_for_approval(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles, content = Bundles(gate_of(site, "{approve: others}")), fab()
    numbers = [str(number) for number in range(app_process.MOST_MESSAGES)]
    assert [asked(bundles, content, number=one) for one in numbers] == [None] * len(numbers)
    assert asked(bundles, content, number="0") is None and asked(bundles, content, 2, "another run's") is None
    reply = asked(bundles, content, number="one more")
    assert reply is not None
    _, said = reply.error.reason.split(": ")
    assert said == "too many messages of the run wait (20 others of run 1 wait for approval; send fewer at once)."
    waiting = next(one for one in bundles.approvals.waiting() if one.run == "1")
    bundles.approvals.decide("1", "yes", waiting.token)
    monkeypatch.setattr(Gate, "__call__", lambda *_: "answered")
    assert asked(bundles, content, number="after the approval") == "answered"


@pytest.mark.usefixtures("unprobed")
def test_messages_of_an_approved_run_wait_for_their_turn(site: Path) -> None:
    content = fab()
    bundles = Bundles(gate_of(site, f"{{allow: [{{fab: {digest(content)}}}]}}"))
    bundles._working.add(1)
    numbers = [str(number) for number in range(app_process.MOST_QUEUED)]
    assert [asked(bundles, content, number=one) for one in numbers] == [None] * len(numbers)
    reply = asked(bundles, content, number="one more")
    assert reply is not None and "wait (100 others of run 1 wait for their turn;" in reply.error.reason


@pytest.mark.usefixtures("unprobed")
def test_refused_runs_use_up_nothing_of_others(site: Path) -> None:
    gate = gate_of(site, "{}", "rounds_per_day: 1\n")
    bundles = Bundles(gate)
    for run in range(1, 4):
        asked(bundles, fab(), run)
    assert gate.ledger is not None
    gate.ledger.append(kind="train", outcome="asked", rho=0.0, run="9", app="a", policy="p", limits=gate.policy.limits)


@pytest.mark.usefixtures("unprobed")
def test_packages_that_are_missing_are_named_to_the_researcher(site: Path) -> None:
    content = fab(packages='["no-such-thing>=2", "flwr>=99"]')
    bundles = Bundles(gate_of(site, f"{{allow: [{{fab: {digest(content)}}}]}}"))
    reply = asked(bundles, content)
    assert reply is not None
    assert "(no-such-thing>=2: not installed; install them here, or set runs.install: from-index)" in reply.error.reason
    bare = written(site, f"{{allow: [{{fab: {digest(content)}}}]}}")
    bare.write_text(bare.read_text().replace("sends:", "sends:\n  refusals: bare"))
    reply = asked(Bundles(Gate(bare)), content)
    assert reply is not None and reply.error.reason == "The site's policy lets no reply leave."


@pytest.mark.usefixtures("unprobed")
def test_a_message_waits_with_its_run_and_others_go_on(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, other = fab(), fab(name="other")
    gate = gate_of(site, f"{{allow: [{{fab: {digest(honest)}}}], approve: others, wait_seconds: 5}}")
    bundles, now = Bundles(gate), [0.0]
    monkeypatch.setattr(app_process.time, "monotonic", lambda: now[0])
    cell = lambda run: bundles._cells[run][0].app  # noqa: E731
    monkeypatch.setattr(
        Gate, "__call__", lambda _, message, context, app, origin: (cell(context.run_id), origin.approved_by)
    )
    assert asked(bundles, other, 1) is None
    assert asked(bundles, honest, 2) == ("brought_app:client", "allow: fab")
    now[0] = 4.9
    assert asked(bundles, other, 1) is None
    now[0] = 5.1
    late = asked(bundles, other, 1)
    assert late is not None and "was not approved within 5 s; approve it" in late.error.reason
    assert not bundles.approvals.waiting()
    assert asked(bundles, other, 1) is None, "its next message waits anew"
    (waiting,) = bundles.approvals.waiting()
    bundles.approvals.decide("1", "yes", waiting.token)
    reply = asked(bundles, other, 1)
    assert isinstance(reply, tuple) and reply[0] == "brought_app:client"


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("revoked", [False, True])
def test_no_reply_leaves_of_a_run_that_is_revoked_while_its_app_works(
    revoked: bool, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(cell: Cell, message: Message, context: Context) -> Message:
        if revoked:
            bundles.approvals.decide("1", REVOKED)
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    content = fab()
    bundles = Bundles(gate_of(site, f"{{allow: [{{fab: {digest(content)}}}]}}"))
    monkeypatch.setattr(Cell, "__call__", works)
    reply = asked(bundles, content)
    assert reply is not None and reply.has_error() == revoked
    assert not revoked or "has not approved the run" in reply.error.reason
    entry, *refused = bundles.gate.ledger.entries()  # type: ignore[union-attr]
    assert entry.outcome == ("failed" if revoked else "sent") and len(refused) == revoked


@pytest.mark.usefixtures("unprobed")
def test_no_reply_leaves_of_a_run_that_is_revoked_before_it_may_leave(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = leaving_every(site, 0.5)
    bundles = Bundles(Gate(place))
    monkeypatch.setattr(Cell, "__call__", lambda _, message, context: Message(message.content.copy(), reply_to=message))
    revokes = threading.Timer(0.2, lambda: bundles.approvals.decide("1", REVOKED))
    revokes.start()
    reply = asked(bundles, fab())
    revokes.join()
    assert reply is not None and reply.has_error() and "has not approved the run" in reply.error.reason


def test_an_app_at_work_ends_once_its_run_is_revoked(site: Path) -> None:
    content = fab("import time\ntime.sleep(600)\n")
    bundles = Bundles(gate_of(site, f"{{allow: [{{fab: {digest(content)}}}]}}"))

    def answered() -> Message | None:
        with TURN:
            return asked(bundles, content)

    with ThreadPoolExecutor(1) as pool:
        reply, started = pool.submit(answered), time.monotonic()
        while not (1 in bundles._cells and bundles._cells[1][0].held):
            time.sleep(0.05)
        bundles.approvals.decide("1", REVOKED)
        while not reply.done() and time.monotonic() - started < 60:
            with TURN:
                bundles.rest()
            time.sleep(0.05)
        assert reply.done(), "it was waited for as long as its time limit"
    assert "has not approved the run" in reply.result().error.reason  # type: ignore[union-attr]
    with TURN:
        bundles.rest()
    assert not bundles._cells


@pytest.mark.usefixtures("unprobed")
def test_what_others_do_is_no_delay_of_a_reply_that_leaves_at_a_multiple(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one run's app could choose when a reply to another leaves."""
    place = leaving_every(site, 1)
    bundles, begun, took = Bundles(Gate(place)), threading.Event(), list[float]()

    def reply_of(cell: Cell, message: Message, context: Context) -> Message:
        begun.set()
        return Message(message.content.copy(), reply_to=message)

    def answered() -> None:
        with TURN:
            started = time.monotonic()
            asked(bundles, fab())
            took.append(time.monotonic() - started)

    monkeypatch.setattr(Cell, "__call__", reply_of)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(answered)
        assert begun.wait(60)
        time.sleep(0.5)
        with TURN:  # as while noise is added to another run's weights
            time.sleep(1.0)
        done.result(60)
    assert 2 <= took[0] < 2.4


@pytest.mark.usefixtures("unprobed")
def test_packages_of_one_run_are_installed_while_another_is_answered(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ends = threading.Event(), threading.Event()

    def installs(unmet: Any, folder: Path) -> Path:
        begun.set()
        assert ends.wait(60)
        return folder

    def answered(content: bytes, run: int, number: str = "") -> Message | None:
        with TURN:
            return asked(bundles, content, run, number)

    needs, plain = fab(packages='["no-such-thing"]'), fab()
    allowed = ", ".join(f"{{fab: {digest(each)}}}" for each in (needs, plain))
    bundles = Bundles(gate_of(site, f"{{allow: [{allowed}], install: from-index}}"))
    monkeypatch.setattr(app_process, "install_packages", installs)
    monkeypatch.setattr(Cell, "__call__", lambda _, message, context: Message(message.content.copy(), reply_to=message))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(answered, needs, 1)
        assert begun.wait(60)
        reply = answered(plain, 2)
        assert reply is not None and reply.has_content() and not first.done()
        assert answered(needs, 1, "next") is None, "they are installed once"
        ends.set()
        installed = first.result(60)
    assert installed is not None and installed.has_content()


@pytest.mark.usefixtures("unprobed")
def test_a_run_s_message_is_answered_while_another_run_s_app_works(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works, ends = threading.Event(), threading.Event()

    def reply_of(cell: Cell, message: Message, context: Context) -> Message:
        if context.run_id == 1 and not ends.is_set():
            works.set()
            assert ends.wait(60)
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    def answered(run: int, number: str = "") -> Message | None:
        with TURN:
            return asked(bundles, content, run, number)

    content = fab()
    bundles = Bundles(gate_of(site, f"{{allow: [{{fab: {digest(content)}}}]}}"))
    monkeypatch.setattr(Cell, "__call__", reply_of)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(answered, 1)
        assert works.wait(60)
        other = answered(2)
        assert other is not None and other.has_content() and not first.done()
        assert answered(1, "next") is None, "an app answers one message at a time"
        ends.set()
        reply = first.result(60)
    assert reply is not None and reply.has_content()
    following = answered(1, "next")
    assert following is not None and following.has_content()
    entries = bundles.gate.ledger.entries()  # type: ignore[union-attr]
    assert [(entry.run, entry.outcome) for entry in entries] == [("1", "sent"), ("2", "sent"), ("1", "sent")]


def test_a_supernode_asks_for_messages_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class State:
        replies: tuple[str, ...] = ()

        def get_messages_legacy(self, **_: object) -> tuple[str, ...]:
            found, self.replies = self.replies, ()
            return found

    state, pulled, pushed = State(), iter([7, None, 8, None, None]), list[object]()
    monkeypatch.setattr(flower_node, "_pull_and_store_message", lambda **_: next(pulled))
    monkeypatch.setattr(flower_node, "_push_messages", lambda state, **_: pushed.append(state.get_messages_legacy()))
    monkeypatch.setattr(supernode, "PUSH_SECONDS", 0)
    supernode.take_more_messages()
    for expected, replies in ((7, ()), (0, ()), (8, ("second",)), (0, ("first",))):
        assert flower_node._pull_and_store_message(state=state) == expected
        state.replies = replies
        flower_node._push_messages(state=state, send=None)  # type: ignore[call-arg,arg-type]
    assert pushed == [("second",), ("first",)], "the first message holds up no other"
    assert flower_node._pull_and_store_message(state=state) is None, "none is left, so that the node may rest"


def test_an_app_of_a_bundle_runs_in_a_new_process_for_each_message(site: Path) -> None:
    kept = 'int(context.state.config_records["own"]["n"]) if "own" in context.state else 0'
    code = CLIENT.replace("STEP", kept).replace(
        "    arrays = ArrayRecord",
        '    context.state["own"] = ConfigRecord({"n": metrics["kept"] + 1})\n    arrays = ArrayRecord',
    )
    content = fab(code.replace("import Array,", "import Array, ConfigRecord,"))
    (site / "data").mkdir()
    more = "app: {reads: [data]}\n"
    gate = gate_of(site, f"{{allow: [{{fab: {digest(content)}}}]}}", more)
    bundles = Bundles(gate)
    for number in range(2):
        reply = asked(bundles, content)
        assert reply is not None and reply.has_content(), reply
        assert reply.content.array_records["arrays"]["w"].numpy().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        told = dict(reply.content.metric_records["metrics"])
        assert told == {"num-examples": 64, "train_loss": 0.125, "calls": 1, "kept": float(number)}
        bundles.rest()
    bundles._cells[1][0].close()
    entries = gate.ledger.entries()  # type: ignore[union-attr]
    assert [(entry.kind, entry.outcome, entry.approved_by) for entry in entries] == [
        ("train", "sent", "allow: fab")
    ] * 2
    assert entries[0].fab == digest(content)
    assert entries[0].left == "6 values in arrays, num-examples, train_loss, calls, kept"


WRITES = """
    place = Path("{data}/new")
    try:
        place.write_text("x")
    except OSError:
        pass
    metrics["kept"] = float(place.exists())
"""


def test_a_site_s_data_stay_as_they_are_and_another_app_s_replies_count_too(site: Path) -> None:
    (site / "data").mkdir()
    data = (site / "data").resolve()
    code = CLIENT.replace("STEP", "0").replace(
        "    arrays = ArrayRecord", WRITES.format(data=data) + "    arrays = ArrayRecord"
    )
    first, second = fab(code), fab(code, name="other")
    runs = f"{{allow: [{{fab: {digest(first)}}}, {{fab: {digest(second)}}}]}}"
    policy = POLICY.replace("{ledger: site/ledger", "{epsilon: 2, ledger: site/ledger")
    place = written(site, runs, "app: {reads: [data]}\nprotect: {clip_norm: 1.0, noise: {noise_multiplier: 4.0}}\n")
    place.write_text(place.read_text().replace(POLICY, policy))
    gate = Gate(place)
    bundles = Bundles(gate)
    said = [asked(bundles, content, run) for run, content in ((1, first), (2, second))]
    assert all(reply is not None and reply.has_content() for reply in said), said
    assert not (data / "new").exists()
    assert gate.ledger is not None
    spent = gate.policy.limits.spent(gate.ledger.account())
    assert spent > 0 and gate.ledger.account().rho == pytest.approx(2 * (gate.policy.rho("train") or 0))
    third = asked(bundles, second, 3)
    while third is not None and third.has_content():
        third = asked(bundles, second, 3)
    assert third is not None and "the budget is used up" in third.error.reason


def test_an_app_that_can_t_be_loaded_is_refused(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = fab("import no_such_module\n")
    bundles = Bundles(gate_of(site, f"{{allow: [{{fab: {digest(content)}}}]}}"))
    with caplog.at_level(logging.WARNING):
        reply = asked(bundles, content)
    assert reply is not None and reply.has_error()
    assert "no_such_module" in caplog.text and reply.error.reason.endswith(": the app failed.")


def test_a_system_that_can_t_isolate_is_refused_with_the_reason(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Isolation(network=["seccomp"], files=["Landlock 4"], missing=["namespaces (Operation not permitted)"])
    monkeypatch.setattr(app_process.Apart, "begin", lambda apart, asked, deadline: lacking)
    with pytest.raises(UserError, match=r"namespaces \(Operation not permitted\).*isolation: none"):
        Bundles(gate_of(site, "{}"))
    Bundles(gate_of(site, "{}", "app: {isolation: none}\n"))


@pytest.mark.long  # pip takes its time
def test_missing_packages_come_from_the_site_s_index(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = site / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "brought_along-1.0-py3-none-any.whl", "w") as wheel:
        about = "brought_along-1.0.dist-info"
        wheel.writestr("brought_along.py", "NUMBER = 5\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: brought-along\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    code = CLIENT.replace("STEP", "brought_along.NUMBER").replace("import os", "import brought_along")
    content, none = fab(code, packages='["brought-along>=1"]'), fab(packages='["brought-along>=2"]')
    url = fab(packages='["brought-along @ https://example.org/a.whl"]')
    allowed = ", ".join(f"{{fab: {digest(each)}}}" for each in (content, none, url))
    bundles = Bundles(gate_of(site, f"{{allow: [{allowed}], install: from-index}}"))
    reply = asked(bundles, content)
    assert reply is not None and reply.has_content(), reply
    assert reply.content.metric_records["metrics"]["kept"] == 5
    for run, other in enumerate((none, url), 2):
        reply = asked(bundles, other, run)
        assert reply is not None and "packages that are not installed" in reply.error.reason


def test_so_many_apps_work_at_once_and_each_task_gets_its_own_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        secret = bytes(32)

        def client(self, token: Any, patient: bool = True) -> Any:
            return SimpleNamespace(
                AcquireTask=acquired, SendTaskHeartbeat=lambda _: None, close=lambda: None, run=token
            )

    def acquired(_: Any) -> Any:
        if len(pushed) == 9:
            raise httpx.HTTPStatusError("enough", request=None, response=httpx.Response(400))  # type: ignore[arg-type]
        run = next(runs, 0)
        return SimpleNamespace(HasField=lambda _: bool(run), token=run)

    def app(message: Message, context: Context, brought: Brought) -> Message | None:
        told = {"n": context.run_id}
        if context.run_id < 5:
            with others_turn():
                together.wait(30)  # a broken barrier is an error, which would be the reply
        elif context.run_id not in waited:
            waited.add(context.run_id)
            return None
        return Message(RecordDict({"m": MetricRecord(told)}), reply_to=message)

    def pulled(client: Any) -> tuple[Message, Context, None, Fab]:
        return *question(client.run), None, Fab("", b"", {})

    runs, together = iter(range(1, 10)), threading.Barrier(4)
    pushed, waited = dict[int, Any](), set[int]()
    monkeypatch.setattr(supernode, "pull_task_input", pulled)
    monkeypatch.setattr(
        supernode, "push_message", lambda client, reply, context: pushed.update({client.run: (reply, context.run_id)})
    )
    monkeypatch.setattr(supernode, "push_task_output", lambda *_: None)
    monkeypatch.setattr(supernode.asking_as, "RuntimeTokenHttpInterceptor", lambda token: token)
    with pytest.raises(httpx.HTTPStatusError):
        supernode.answer_messages(Node(), app, at_once=5)  # type: ignore[arg-type]
    assert waited == {5, 6, 7, 8, 9}
    for run, (reply, of) in pushed.items():
        assert of == run and reply.metadata.reply_to_message_id == str(run) and reply.has_content(), reply
        assert reply.content["m"]["n"] == run
