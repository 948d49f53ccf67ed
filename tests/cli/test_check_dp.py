"""``fl-privacy check-dp``: subjects, answers, exit statuses, and what is refused in a line."""

import json
from pathlib import Path

import pytest

from fl_privacy.cli.main import run_command_line

pytestmark = pytest.mark.usefixtures("few_seeds")

MODULE = """
from flwr.clientapp.mod import LocalDpMod
none = LocalDpMod(1.0, 0.0, 1.0, 1e-5)
number = 3
def makes():
    return {}["nothing"]
def answer(update):
    return {name: value * 0 for name, value in update.items()}
"""


@pytest.fixture
def subjects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "claimed_subjects.py").write_text(MODULE)
    (tmp_path / "claimed_broken.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_mod_without_noise_is_status_1_with_page_and_json(subjects: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "check-dp",
        "claimed_subjects:none",
        "--draws",
        "200",
        "parameters=10",
        "--json",
        "--out",
        "page.html",
    ]
    assert run_command_line(asked) == 1
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert claim["status"] == "contradicted"
    assert claim["claimed"] == 1.0 and claim["rdp"] == "inf"
    assert "no noise is added" in claim["reason"]
    assert "does not hold" in (subjects / "page.html").read_text()


def test_a_function_of_your_own(subjects: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["check-dp", "claimed_subjects:answer", "--epsilon", "1", "--draws", "200", "parameters=10"]
    assert run_command_line(asked) == 0
    assert "No test contradicts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["claimed_subjects:number"], "is a int"),
        (["claimed_subjects:missing"], "'missing'"),
        (["no_such_module:mod"], "can't be imported"),
        (["claimed_broken:mod"], "can't be imported (SyntaxError"),
        (["claimed_subjects:makes"], "is expected to make a mechanism, but raised KeyError"),
        (["nothing"], "module:attribute"),
        (["."], "neither"),
        (["claimed_subjects:none", "noise=pink"], "noise"),
        (["claimed_subjects:none", "noize=other"], "noize"),
        (["claimed_subjects:none", "parameters=many"], "whole number"),
        (["claimed_subjects:none", "--draws", "3"], "whole number from 200 to"),
        (["claimed_subjects:none", "--epsilon", "-1"], "--epsilon"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    subjects: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run_command_line(["check-dp", *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed
