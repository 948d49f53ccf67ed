"""What a run had recorded when it was killed can be read."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.folder import read_run
from tests.experiment.runs import Run, wait_until

SETTINGS = (
    "federation.clients=2",
    "federation.rounds=100000",
    "victims=2",
    "attack=inverting_gradients",
    "attack.iterations=2",
    "intercept.rounds=first",
    "intercept.when=during",
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kill a run with -9 after some rounds and return its folder."""
    out = tmp_path_factory.mktemp("killed")
    process = subprocess.Popen(
        [sys.executable, "-m", "fl_privacy", "run", *SETTINGS, f"out={out}"], stdout=subprocess.DEVNULL
    )

    def some_rounds() -> bool:
        assert process.poll() is None, "the run ended by itself"
        return any(path.read_text().count('"kind": "round"') >= 3 for path in out.glob("*/metrics.jsonl"))

    try:
        wait_until(some_rounds, seconds=240)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (folder,) = out.glob("[!.]*")
    return folder


@pytest.mark.long
def test_everything_recorded_is_readable(killed: Path) -> None:
    recorded = read_run(killed)
    rounds = recorded.of_kind("round")
    assert not recorded.finished
    assert [r["round"] for r in rounds] == list(range(1, len(rounds) + 1))
    assert all(0 <= r["accuracy"] <= 1 for r in rounds)
    assert len(recorded.of_kind("image")) == 2
    assert len(recorded.read_pairs()[0]) == 2
    assert recorded.threat_model
    assert recorded.partition is not None
    for path in killed.rglob("*.json"):
        json.loads(path.read_text())


@pytest.mark.long
def test_the_report_of_a_killed_run(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_reported(killed, capsys)


def test_what_a_killed_run_leaves_is_reported(
    undefended: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without what is written at the end, whose last record is cut."""
    folder = tmp_path / "killed"
    shutil.copytree(undefended.path, folder, ignore=shutil.ignore_patterns("summary.json", "*.html"))
    records = (folder / "metrics.jsonl").read_text().splitlines()
    at = max(k for k, line in enumerate(records) if '"kind": "round"' in line)
    (folder / "metrics.jsonl").write_text("\n".join([*records[: at + 1], records[at][:40]]))
    recorded = read_run(folder)
    assert not recorded.finished and len(recorded.of_kind("round")) == 2
    assert_reported(folder, capsys)


def assert_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["report", str(folder)]) == 0
    page = Path(capsys.readouterr().out.splitlines()[-1])
    assert page == folder / "report.html"
    assert "<svg" in page.read_text()
