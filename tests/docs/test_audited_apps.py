"""The pages on audited apps are what their rows give."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))


@pytest.mark.usefixtures("experiments")
def test_flowers_examples_are_those_of_the_rows() -> None:
    examples = importlib.import_module("flower_examples")
    assert examples.PAGE.read_text(encoding="utf-8") == examples.table()


@pytest.mark.usefixtures("experiments")
def test_apps_of_others_are_those_of_the_rows() -> None:
    others = importlib.import_module("third_party_apps")
    assert others.PAGE.read_text(encoding="utf-8") == others.table(others.RowFile(others.ROWS).rows)


@pytest.mark.usefixtures("experiments")
def test_an_app_that_sent_nothing_has_no_page_on_what_it_sends() -> None:
    examples = importlib.import_module("flower_examples")
    row = {"headline": "Nothing", "uploaded": "no arrays", "findings": [], "problems": ["E: no file (2 replies)"]}
    assert "no client sent anything (E: no file" in examples.why_none(row)
    ended = {**row, "headline": "Nothing to audit: the server ended: E: no host", "problems": []}
    assert examples.why_none(ended) == "its page says that no client sent anything (the server ended: E: no host)"
    assert not examples.why_none({**row, "uploaded": "weights of 4 parameters and buffers (2 kB)"})
    assert examples.why_none({"reason": "error: No app; --debug shows the traceback."}) == "No app"


@pytest.mark.usefixtures("experiments")
@pytest.mark.parametrize("why", ["no client trained: KeyError: 'x'", "the app's server ended before a client trained"])
def test_initial_parameters_alone_are_no_page_on_what_clients_upload(why: str) -> None:
    tries = importlib.import_module("first_tries")
    row = {"headline": f"Not attacked: {why}", "uploaded": "10 arrays", "findings": [], "problems": []}
    row |= {"format": "scripts", "traceback": False, "repository": "one/app"}
    assert ", 0 ended in a page" in tries._counts([row])
    assert ", 1 ended in a page" in tries._counts([{**row, "headline": "Not attacked: its layer is not known"}])


@pytest.mark.usefixtures("experiments")
def test_a_page_on_a_network_alone_counts_apart() -> None:
    tries = importlib.import_module("first_tries")
    row = {"headline": "The project's own training was not audited: E", "uploaded": "10 arrays", "findings": []}
    row |= {"problems": [], "format": "scripts", "traceback": False, "repository": "one/app", "rungs": [{"counts": {}}]}
    row |= {"network_alone": "Net (model.py) alone"}
    assert ", 0 ended in a page" in tries._counts([row]) and "1 more in a page on the network alone" in tries._counts(
        [row]
    )
    assert tries.how_ended(row).startswith("network alone: The project's own training was not audited")
    row |= {
        "headline": "Only the app's network was audited",
        "problems": ["Its training was not audited: server.py raised E"],
    }
    assert (
        tries.how_ended(row)
        == "network alone: Only the app's network was audited. Its training was not audited: server.py raised E"
    )


@pytest.mark.usefixtures("experiments")
def test_commands_that_run_at_once_keep_each_others_rows(tmp_path: Path) -> None:
    row_file = importlib.import_module("row_file")
    first, second = row_file.RowFile(tmp_path), row_file.RowFile(tmp_path)
    first.add({"app": "a"}, {"figure": 1})
    second.add({"app": "b"}, {"figure": 2})
    first.add({"app": "a"}, {"figure": 3})
    assert [row["figure"] for row in row_file.RowFile(tmp_path).rows] == [2, 3]
