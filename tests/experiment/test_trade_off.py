"""A sweep over defenses comes to the same table whether or not it is killed, and does nothing twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.federation.processes import end_workers, worker_processes
from fl_privacy.runs import study as study_results
from fl_privacy.runs.config.study import load_grid
from fl_privacy.runs.folder.study import read_tables
from tests.experiment.runs import run, stamps, wait_until

BATCH = 128  # of federation=fedsgd, the default
GRID = """
settings: [federation.clients=2, federation.rounds=2]
train: [evaluate_every=2]
attack: [victims=2, threat_model=adaptive]
attacks:
  iDLG: [attack=idlg, attack.iterations=3]
weights: final
defenses:
  Pruning: [defense=pruning, "defense.rate=0.5,0.99"]
"""


def finish(grid: Path, out: Path, *options: str) -> Path:
    done = run("trade-off", str(grid), *options, out=out)
    assert done.status == 0
    return done.path


def table(page: Path) -> Any:
    return json.loads(page.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grid") / "grid.yaml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="module")
def page(grid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(grid, tmp_path_factory.mktemp("sweep") / "runs")


def test_every_point_is_trained_and_attacked(page: Path) -> None:
    undefended, weak, strong = table(page)
    assert [row["strength"] for row in (undefended, weak, strong)] == ["", "rate 0.5", "rate 0.99"]
    assert undefended["pmm"] == 100
    assert all(0 <= row["accuracy"] <= 1 for row in (undefended, weak, strong))
    assert [entry["attacker"] for entry in undefended["leakage"]] == ["plain"]
    for row, rate in ((weak, 0.5), (strong, 0.99)):
        assert [entry["attacker"] for entry in row["leakage"]] == ["plain", "adaptive"]
        assert all(entry["metrics"]["psnr"]["n"] == 2 for entry in row["leakage"])
        assert row["update_distortion"]["zeros"]["mean"] == pytest.approx(rate, abs=0.03)
    assert strong["bytes_per_upload"] < weak["bytes_per_upload"] < undefended["bytes_per_upload"]
    text = page.read_text()
    assert text.count("<svg") == 3 + 4, "PSNR, SSIM, LPIPS; CAP and three curves"
    assert "Pruning" in text and "adaptive attacker" in text


@pytest.mark.fuzz
def test_a_killed_sweep_ends_with_the_same_table(grid: Path, page: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "fl_privacy", "trade-off", str(grid), f"out={out}", "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.poll() is not None or len(list(out.glob("*/summary.json"))) >= 2, seconds=240)
        assert process.poll() is None, "the sweep ended by itself"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finished = {path.parent / "metrics.jsonl" for path in out.glob("*/summary.json")}
    before = {path: at for path, at in stamps(out).items() if path in finished}
    assert table(finish(grid, out, "--jobs", "2")) == table(page)
    assert {path: at for path, at in stamps(out).items() if path in finished} == before


@pytest.mark.long
def test_what_a_kill_left_unfinished_is_done_again_and_no_more(grid: Path, page: Path) -> None:
    wanted, before = table(page), stamps(page.parent)
    half = next(path.parent for path in sorted(before) if '"kind": "image"' in path.read_text())
    (half / "summary.json").unlink()
    assert table(finish(grid, page.parent)) == wanted
    after = stamps(page.parent)
    assert {path for path in before if before[path] != after.get(path)} == {half / "metrics.jsonl"}


@pytest.mark.long
def test_a_worker_has_the_environment_and_the_folder_of_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not those of an earlier command whose workers are kept."""
    monkeypatch.setenv("HOME", "/elsewhere")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("NOTED", name)
        with worker_processes(1, threads=1, environment={"HOME": "/nowhere"}) as pool:
            found = [pool.submit(os.getenv, key) for key in ("HOME", "NOTED")]
            folder = pool.submit(os.getcwd)
        assert [one.result() for one in found] == ["/nowhere", name]
        assert folder.result() == str(tmp_path / name)
    end_workers()


def test_a_finished_sweep_only_reports(grid: Path, page: Path) -> None:
    before = stamps(page.parent)
    assert finish(grid, page.parent, "--psnr-below", "99") == page
    assert stamps(page.parent) == before
    assert "below 99.0 dB" in page.read_text()


def test_advice_is_the_same_from_the_folder_and_from_the_grid(
    grid: Path, page: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["accuracy_loss=100", "threat=adaptive"]
    assert run_command_line(["advise", "--table", str(page.parent), *asked]) == 0
    of_folder = capfd.readouterr().out
    assert run_command_line(["advise", "--grid", str(grid), f"out={page.parent}", *asked]) == 0
    assert capfd.readouterr().out == of_folder
    assert "2 defenses" in of_folder


def test_a_table_says_on_how_many_examples_its_clients_trained(page: Path) -> None:
    (table,) = read_tables(page.parent / "measured.json")
    assert table.trained_batch_sizes == (BATCH,)
    assert table.settings[0] == "federation.clients=2"


def test_who_attacked_is_said_with_all_batch_sizes_and_what_the_user_changed() -> None:
    said = study_results._attackers
    assert said(load_grid("spn"), ()) == (
        *("federation=fedsgd", "attack=dlg", "attack.start=pattern", "attack.iterations=12", "tracing=10"),
        *("batch_size=1", "batch_size=4", "batch_size=8"),
    )
    overrides = ["threat_model=adaptive", "batch_size=4", "data=mnist"]
    assert set(said(load_grid("quick", overrides), overrides)) == {*overrides, "victims=8"}
