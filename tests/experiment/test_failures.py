"""What goes wrong in a part does not take the rest along."""

from pathlib import Path

import pytest

from fl_privacy.report import write_report
from fl_privacy.runs.config import RunSettings
from fl_privacy.runs.folder import read_run
from tests.experiment.runs import TINY, UNATTACKED, run

STRANGERS = "tests.experiment.strangers"


def test_a_model_of_the_users_own(tmp_path) -> None:
    own = run("run", *TINY, "model=custom", f"model._target_={STRANGERS}.Net", "+model.width=2", out=tmp_path)
    assert own.status == 0
    assert len(own.scores()) == 4


def test_an_option_that_the_users_model_does_not_take(tmp_path, capfd) -> None:
    arguments = ("model=custom", f"model._target_={STRANGERS}.Net", "+model.widht=2")
    assert run("run", *TINY, *arguments, out=tmp_path).status == 2
    assert "did you mean width?" in capfd.readouterr().err


@pytest.mark.parametrize("group", ["data", "model", "attack", "defense"])
def test_custom_parts_have_to_be_named(group: str, tmp_path, capfd) -> None:
    settings = [s for s in TINY if not s.startswith("attack")]
    assert run("run", *settings, f"{group}=custom", out=tmp_path).status == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert f"{group}._target_" in error[0]


def test_an_attack_that_raises_costs_its_victims_only_and_is_no_success(tmp_path, caplog, capfd) -> None:
    settings = (*TINY[:4], "attack=custom", f"attack._target_={STRANGERS}.broken_attack", "+attack.message=oh dear")
    failed = run("run", *settings, out=tmp_path)
    assert failed.status == 3
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "failed on all victims" in line
    assert "oh dear" in line and "overwrite=true" in line
    assert "oh dear" in caplog.text
    victims = failed.records("image")
    assert len(victims) == 4
    assert all(victim["failure"] == "ArithmeticError: oh dear" for victim in victims)
    summary = failed.json("summary.json")
    assert [entry["plain"]["failures"] for entry in summary["attacked"]] == [2, 2]
    assert summary["failures"] == 2
    assert summary["final_accuracy"] is not None
    assert "oh dear" in (failed.path / "report.html").read_text()
    assert run("run", *settings, out=tmp_path).status == 3  # finished already, and no better for it


def test_when_all_clients_fail_the_run_stops_in_one_line_and_stays_readable(tmp_path, capfd) -> None:
    stopped = run("run", *UNATTACKED, "model=custom", f"model._target_={STRANGERS}.one_sided_net", out=tmp_path)
    assert stopped.status == 2
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "all 2 clients failed" in error[0]
    (folder,) = tmp_path.glob("[!.]*")
    recorded = read_run(folder)
    assert not recorded.finished
    assert recorded.threat_model
    assert write_report([folder]).is_file()


@pytest.mark.long
def test_a_sweep_tells_which_of_its_attacks_came_to_nothing(tmp_path, capfd) -> None:
    swept = run("attack", "-m", "victims=1", "attack=idlg,analytic", "model=lenet", out=tmp_path)
    assert swept.status == 3
    assert swept.path.name == "comparison.html"
    error = capfd.readouterr().err
    assert "1 of 2 runs" in error
    assert "analytic" in error


def test_code_that_ends_the_program_is_an_error(tmp_path, capfd) -> None:
    arguments = ("model=custom", f"model._target_={STRANGERS}.quitter")
    assert run("run", *TINY, *arguments, out=tmp_path).status == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert "SystemExit" in error


def test_a_job_that_can_not_be_planned_keeps_no_other_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unplanned(config: RunSettings) -> RunSettings:
        raise OSError("no data for the first of them")

    monkeypatch.setattr("fl_privacy.runs.study.calibrated", unplanned)
    swept = run("run", "-m", "seed=0", *UNATTACKED, out=tmp_path)
    assert swept.status == 0 and len(list(tmp_path.glob("*/summary.json"))) == 1
