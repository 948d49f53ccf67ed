"""``-m``: every combination, nothing twice, and a failing one does not stop the others."""

import shutil
from pathlib import Path

import pytest

from fl_privacy.runs.folder.ongoing import read_planned
from tests.experiment.runs import TINY, UNATTACKED, Run, run, stamps

SWEEP = ("run", "-m", *UNATTACKED, "defense=none,pruning", "seed=0,1")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(*SWEEP, out=tmp_path_factory.mktemp("sweep"))


def test_every_combination_is_run_and_compared(swept: Run) -> None:
    assert swept.status == 0
    assert swept.path.name == "comparison.html"
    folders = sorted(path.name.rsplit("-", 1)[0] for path in swept.path.parent.glob("[!.]*") if path.is_dir())
    assert folders == [f"mnist_mini-lenet-fedsgd-{defense}-none" for defense in ("none", "none", "pruning", "pruning")]
    assert {name.rsplit("-", 1)[0] for name in read_planned(swept.path.parent)} == set(folders)
    assert all((swept.path.parent / name / "summary.json").is_file() for name in read_planned(swept.path.parent))
    page = swept.path.read_text()
    assert "pruning" in page
    assert "<svg" in page


def test_a_sweep_goes_on_where_it_was_killed(swept: Run, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    shutil.copytree(swept.path.parent, out)
    interrupted = next(out.glob("*pruning*"))
    (interrupted / "summary.json").unlink()
    before = stamps(out)
    again = run(*SWEEP, out=out)
    assert again.status == 0
    assert sum("Finished already" in line for line in again.printed) == 3
    after = stamps(out)
    redone = interrupted / "metrics.jsonl"
    aside = out / f"{interrupted.name}-interrupted-1" / "metrics.jsonl"
    assert after.pop(redone) > before[redone]
    assert after.pop(aside) == before.pop(redone)
    assert after == before


def test_a_failing_job_does_not_stop_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = (*UNATTACKED, "baseline=false", "defense=pruning", "defense.rate=1.5,0.5")
    half = run("run", "-m", *settings, out=tmp_path)
    assert half.status == 2
    assert [path.name.split("-")[3] for path in tmp_path.glob("[!.]*") if path.is_dir()] == ["pruning"]
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "1 of 2 runs failed" in error[0]
    assert "defense.rate=1.5" in error[0]


def test_a_sweep_of_attacks(tmp_path: Path) -> None:
    both = run("attack", "-m", "attack=idlg,inverting_gradients", "attack.iterations=2", "victims=1", out=tmp_path)
    assert both.status == 0
    assert both.path.name == "comparison.html"
    assert sorted(path.name for path in tmp_path.glob("[!.]*") if path.is_dir()) == sorted(read_planned(tmp_path))
    assert len(read_planned(tmp_path)) == 2


@pytest.mark.parametrize("command", ["run", "attack"])
def test_what_has_finished_is_found_before_anything_is_built(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (command, *TINY, "defense=pruning", "baseline=false")
    first = run(*settings, out=tmp_path)
    assert first.status == 0

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("it was built again")

    for module in ("fl_privacy.runs.run", "fl_privacy.runs.attack"):
        monkeypatch.setattr(f"{module}.build_setup", refuse)
    for name in ("build_dataset", "agreed_network", "prepared_client"):
        monkeypatch.setattr(f"fl_privacy.runs.build.{name}", refuse)
    again = run(*settings, out=tmp_path)
    assert again.status == 0
    assert again.path == first.path
    assert any("Finished already" in line for line in again.printed)


def test_what_only_an_attack_reads_is_refused_by_a_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("run", *UNATTACKED, "captured=/nowhere/run", out=tmp_path).status == 2
    assert "fl-privacy attack" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
