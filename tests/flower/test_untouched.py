"""Apps of all kinds that Flower's examples have, in a few lines each, audited as they are."""

import random
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import MOST_NODES, read_app
from fl_privacy.auditing.app.check import stops_of
from fl_privacy.auditing.app.review import review_app
from fl_privacy.auditing.app.stated import MOST_BYTES
from fl_privacy.errors import UserError
from fl_privacy.flower.grids import LocalGrid
from tests.flower.untouched_apps import (
    AUTOENCODER,
    HALF,
    HEAD_ONLY,
    LANGUAGE,
    LEGACY_SERVER,
    LINEAR,
    LISTED,
    NOISY,
    PLAIN,
    PROJECT,
    QUERY,
    QUERY_SERVER,
    SERVER,
    SMOOTHED,
    TABULAR,
    TREES,
    VAE,
    WRAPPED,
    audited,
    rung,
    write,
)


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize(
    ("name", "client", "server", "kind"),
    [
        ("app_plain", PLAIN, SERVER, "image"),
        ("app_smoothed", SMOOTHED, SERVER, "image"),
        ("app_noisy", NOISY, SERVER, "image"),
        ("app_wrapped", WRAPPED, SERVER, "image"),
        ("app_autoencoder", AUTOENCODER, SERVER, "row"),
        ("app_vae", VAE, SERVER, "image"),
        ("app_tabular", TABULAR, SERVER, "row"),
        ("app_language", LANGUAGE, SERVER, "text"),
        ("app_listed", LISTED, LEGACY_SERVER, "image"),
        ("app_half", HALF, SERVER, "image"),
        ("app_heads", HEAD_ONLY, SERVER, "image"),
    ],
)
def test_networks_are_attacked(tmp_path: Path, name: str, client: str, server: str, kind: str) -> None:
    record = audited(tmp_path, name, client, server)
    first = rung(record, "gradient")
    assert not record["problems"]
    assert first["kind"] == kind, first["reason"]
    assert first["counts"]["judged"] + first["counts"]["failures"] == 2
    if name not in ("app_vae", "app_heads"):
        assert first["counts"]["read"] == 2, first
        assert first["control"]["read"] == 0
    one = rung(record, "one")
    assert one["counts"] is not None, one["reason"]
    if name in ("app_plain", "app_smoothed", "app_listed", "app_wrapped", "app_tabular", "app_language"):
        assert one["counts"]["read"] == 2 and record["tone"] == "leak", one
    assert rung(record, "all")["counts"] is None and "no time was left" in rung(record, "all")["reason"]


@pytest.mark.parametrize(
    ("name", "client", "text"), [("app_linear", LINEAR, ""), ("app_trees", TREES, "decision trees")]
)
def test_other_frameworks_have_an_inventory(tmp_path: Path, name: str, client: str, text: str) -> None:
    record = audited(tmp_path, name, client)
    assert [each["rung"] for each in record["rungs"]] == (["trees", "site"] if text else [])
    assert all(each["counts"] is None and each["reason"] for each in record["rungs"])
    assert record["tone"] == "open"
    said = [record["headline"], *record["further"]]
    assert said[-1].startswith("Not attacked")
    assert bool(text) == said[0].startswith("Clients send facts about their data in the clear: decision trees")
    assert {line["key"] for line in record["inventory"]} >= {"0", "num-examples"}
    assert bool(text) == any(text in finding["what"] for finding in record["findings"])


def test_data_in_replies_come_first(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_query", QUERY, QUERY_SERVER)
    assert record["tone"] == "leak"
    assert record["headline"].startswith("Clients send data in the clear: 40 of 40 rows")
    (problem,) = record["problems"]
    assert re.fullmatch(r"RuntimeError: no such thing \(client\.py, line \d+\) \(2 replies\)", problem)
    found = {finding["where"]: finding["severity"] for finding in record["findings"]}
    assert found == {"data/X": "data", "metrics/classes": "facts", "state/who": "facts", "state/blob": "look"}


def test_clients_that_all_fail_are_not_called_unattackable(tmp_path: Path) -> None:
    broken = TREES.replace("    text = json.dumps", "    raise next(ERRORS, KeyError('so'))\n    text = json.dumps")
    record = audited(tmp_path, "app_that_fails", f"ERRORS = iter([IndexError(7)])\n{broken}", nodes=3)
    assert re.match(r"Nothing to audit: no client answered: IndexError: 7 \(client\.py, line \d+\)", record["headline"])
    assert record["tone"] == "open"
    page = next(tmp_path.rglob("report.html")).read_text()
    assert "No client sent anything that could be examined" in page and "No client data was found" not in page


def test_clients_that_answer_all_but_training_are_said_not_to_train(tmp_path: Path) -> None:
    evaluates = 'Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5, "num-examples": 4})}), reply_to=msg)'
    broken = PLAIN.replace("def train(msg, context):\n", "def train(msg, context):\n    raise KeyError('lr')\n", 1)
    client = f"{broken}\n@app.evaluate()\ndef evaluate(msg, context):\n    return {evaluates}\n"
    evaluating = SERVER.replace("fraction_evaluate=0.0", "fraction_evaluate=1.0")
    record = audited(tmp_path, "app_untrained", client, evaluating)
    assert record["headline"].startswith("Not attacked: no client trained: KeyError: 'lr'"), record["headline"]


def test_the_training_is_unchanged(tmp_path: Path) -> None:
    """Final arrays are those of the app without an audit, bit for bit."""
    audited(tmp_path, "app_unchanged", PLAIN, rounds=2, victims=1)
    app = read_app(tmp_path / "app")
    begun = app.load(stops_of)
    server, client = begun.server, begun.client
    config = app.with_config((), 2)
    grid = LocalGrid([0, 1], client)
    for context in grid.contexts.values():
        context.run_config = dict(config)
    (tmp_path / "bare").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "bare")
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config)))
    ours = torch.load(tmp_path / "out" / "audit-app_unchanged" / "files" / "final.pt")
    bare = torch.load(tmp_path / "bare" / "final.pt")
    assert all(torch.equal(ours[name], bare[name]) for name in bare)


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_the_last_round_is_a_rung_of_its_own(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_rounds", PLAIN, rounds=2, victims=1, seconds=600.0, only=("batch", "later"))
    assert rung(record, "batch")["counts"]["judged"] == 4
    assert rung(record, "later")["counts"] is not None


def test_an_app_is_read_without_being_run(tmp_path: Path) -> None:
    client = (
        PLAIN.replace("ClientApp()", "ClientApp(mods=[fixedclipping_mod, own])") + "\nimport pickle\nraise SystemExit"
    )
    found = review_app(write(tmp_path, "app_read", client))
    assert [note.what.partition(":")[0] for note in found.protections] == ["fixedclipping_mod"]
    assert [note.what for note in found.mods] == ["own"]
    assert [note.what for note in found.strategies] == ["FedAvg"]
    assert [note.what for note in found.pickles] == ["pickle"]
    assert found.pins == {"flwr>=1.41": False, "torch==2.11": True}
    assert found.settings == {"noise-multiplier": 1.0}
    assert "Not pinned to a version: flwr>=1.41." in found.in_words()


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (None, (), "pyproject.toml"),
        ("[tool", (), "TOML"),
        ("[project]\nname = 'a'", (), "serverapp and clientapp"),
        ("tool = 'x'\nproject = 1", (), "serverapp and clientapp"),
        ("[tool.flwr]\napp = []\nfederations = 'none'", (), "serverapp and clientapp"),
        ("#" * (1 << 21), (), "at most 1024 KiB"),
        ("a = " + "9" * 5000, (), "TOML"),
        (PROJECT.format(name="a") + "a." * 3000 + "b = 1", (), "goes deeper"),
        (PROJECT.format(name="a"), ("nothing=1",), "nothing"),
        (PROJECT.format(name="a"), ("lr='fast'",), "like 0.1"),
    ],
)
def test_a_wrong_app_is_one_line(tmp_path: Path, text: str | None, overrides: tuple[str, ...], said: str) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_app(tmp_path).with_config(overrides, None)


def test_an_app_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    app = read_app(write(tmp_path / "app", "app_broken", "import no_such_package"))
    with pytest.raises(UserError, match="no_such_package"):
        audit_app(app, AppAuditRequest(nodes=2, out=tmp_path / "out"))


def test_an_app_that_opens_a_missing_file_when_imported_is_one_line(tmp_path: Path) -> None:
    app = read_app(write(tmp_path / "app", "app_opens", "open('no_such_metadata.json')"))
    with pytest.raises(UserError, match=r"app_opens opens no_such_metadata\.json when it is imported"):
        audit_app(app, AppAuditRequest(nodes=2, out=tmp_path / "out"))


@pytest.mark.parametrize(
    ("old", "name"),
    [("flwr.common.typing", "UserConfig"), ("flwr.client.typing", "ClientAppCallable, Mod")],
)
def test_names_of_flower_that_moved_are_lent(tmp_path: Path, old: str, name: str) -> None:
    record = audited(
        tmp_path, f"app_of_{name[:4].lower()}", f"from {old} import {name}\n" + PLAIN, victims=1, only=("gradient",)
    )
    assert rung(record, "gradient")["counts"]["judged"] == 1
    assert len(record["notes"]) == 1 and f"{old}.{name.partition(',')[0]}" in record["notes"][0]
    assert record["problems"] == []
    module = sys.modules.get(old)
    assert module is None or not hasattr(module, name)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"no archive"])
def test_a_damaged_bundle_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "app.fab").write_bytes(content)
    with pytest.raises(UserError, match="flwr build"):
        read_app(tmp_path / "app.fab")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bundle_whose_bytes_were_changed_is_one_line(tmp_path: Path, method: int) -> None:
    file = tmp_path / "app.fab"
    with zipfile.ZipFile(file, "w", method) as bundle:
        bundle.writestr("pyproject.toml", "[project]\nname = 'bundled'\n" * 50)
    content = bytearray(file.read_bytes())
    start = content.index(b"pyproject.toml") + len("pyproject.toml")
    content[start : start + 30] = bytes(255 - byte for byte in content[start : start + 30])
    file.write_bytes(content)
    with pytest.raises(UserError, match="flwr build"):
        read_app(file)


@pytest.mark.parametrize("code", ["a" + ".b" * 1200 + "()", "-" * 100_000 + "1", "f(" * 90 + ")" * 90])
def test_a_review_goes_on_after_what_is_nested_too_deeply(tmp_path: Path, code: str) -> None:
    folder = write(tmp_path / "app", "app_nested", PLAIN)
    (folder / "nested.py").write_text(f"exec('x')\n{code}\n")
    (folder / "other.py").write_text("eval('1')\n")
    found = review_app(folder)
    assert any(note.what == "eval" for note in found.runs)
    assert "nested.py" in found.unread or any(note.what == "exec" for note in found.runs)


def test_what_an_app_is_called_moves_no_cursor(tmp_path: Path) -> None:
    folder = write(tmp_path / "app", "app_red", PLAIN)
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace('name = "', 'name = "\\u001b[2J\\n', 1))
    said = review_app(folder).in_words()
    assert "\x1b" not in said and "[2J " in said.splitlines()[0]


def test_an_app_comes_out_of_its_bundle_and_nothing_of_it_lands_elsewhere(tmp_path: Path) -> None:
    folder = write(tmp_path / "app", "app_bundled", PLAIN)
    with zipfile.ZipFile(tmp_path / "app.fab", "w") as bundle:
        for file in folder.rglob("*"):
            bundle.write(file, file.relative_to(folder))
    assert read_app(tmp_path / "app.fab").client == read_app(folder).client
    with zipfile.ZipFile(tmp_path / "app.fab", "a") as bundle:
        bundle.writestr("../elsewhere.py", "")
    with pytest.raises(UserError, match="stay in its folder"):
        read_app(tmp_path / "app.fab")


def test_what_a_review_does_not_read_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path, "app_large", PLAIN)
    (folder / "large.py").write_text("import pickle\n" + "#" * MOST_BYTES)
    (folder / "damaged.py").write_text("def (")
    words = review_app(folder).in_words()
    assert "Not read: large.py (larger than" in words and "Not read: damaged.py" in words


def test_a_review_takes_no_network_in_evaluation_mode_for_text_that_is_run(tmp_path: Path) -> None:
    folder = write(tmp_path, "app_eval", PLAIN)
    (folder / "scores.py").write_text("net.to(device).eval()\nnet.eval()\neval('1')\nimport os\nos.system('ls')\n")
    assert [note.what for note in review_app(folder).runs] == ["eval", "os.system"]


def test_no_file_asks_for_any_number_of_clients(tmp_path: Path) -> None:
    folder = write(tmp_path, "app_many", PLAIN)
    project = folder / "pyproject.toml"
    project.write_text(project.read_text() + "\n[tool.flwr.federations.local]\noptions.num-supernodes = 1000000000\n")
    assert read_app(folder).nodes == MOST_NODES
