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
