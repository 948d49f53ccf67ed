"""``inference=canaries``: the training is the one without, and the run's own claim is held against what they show."""

import html
import json
from pathlib import Path

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.folder import read_run
from tests.experiment.runs import run

pytestmark = pytest.mark.usefixtures("few_seeds")

SMALL = (
    "federation.clients=2", "federation.rounds=2", "evaluate_every=2", "attack=none", "intercept.rounds=all",
    "baseline=false", "model=mlp", "holdout=3900",
)  # fmt: skip


@pytest.mark.parametrize(
    ("defense", "unit"),
    [
        (("defense=dp_noise", "defense.clip_norm=1.0", "defense.scale=1.0"), "client"),
        (("defense=dp_sgd", "defense.noise_multiplier=1.0"), "example"),
    ],
)
def test_canaries_are_of_what_is_protected_and_leave_the_training_alone(
    tmp_path: Path, defense: tuple[str, ...], unit: str
) -> None:
    asked = run("run", *SMALL, *defense, "inference=canaries", "inference.canaries.number=40", out=tmp_path / "with")
    assert asked.status == 0
    (claim,) = read_run(asked.path).claims
    assert claim.unit == unit
    assert claim.status != "contradicted"
    assert claim.claimed is not None and claim.lower is not None and claim.lower <= claim.claimed
    page = html.unescape((asked.path / "report.html").read_text())
    assert "Promised protection" in page and claim.headline in page
    plain = run("run", *SMALL, *defense, out=tmp_path / "without")
    assert [r["accuracy"] for r in plain.records("round")] == [r["accuracy"] for r in asked.records("round")]


def test_without_noise_canaries_are_all_found(tmp_path: Path) -> None:
    asked = run("run", *SMALL, "inference=canaries", "inference.canaries.number=40", out=tmp_path)
    (claim,) = read_run(asked.path).claims
    assert claim.status == "unclaimed"
    assert claim.lower == pytest.approx(claim.noticed)


def test_a_run_is_checked_later_and_keeps_what_its_canaries_showed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = run(
        "run", *SMALL, "defense=dp_noise", "defense.clip_norm=1.0", "defense.scale=1.0", "inference=canaries",
        "inference.canaries.number=40", out=tmp_path,
    )  # fmt: skip
    assert run_command_line(["check-dp", str(asked.path), "--draws", "200", "parameters=20"]) == 0
    assert "recomputed" in capsys.readouterr().out
    assert len(read_run(asked.path).claims) == 3
    assert run_command_line(["report", str(asked.path), "--brief"]) == 0
    assert "Promised protection" in (asked.path / "brief.html").read_text()


def test_a_run_folder_that_states_any_number_of_steps_is_counted_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = run("run", *SMALL, "defense=dp_noise", "defense.clip_norm=1.0", "defense.scale=1.0", out=tmp_path)
    stated = json.loads((asked.path / "run.json").read_text())
    stated["config"]["federation"]["plan"] = {"batch_size": 1, "epochs": 1 << 50}
    (asked.path / "run.json").write_text(json.dumps(stated))
    assert run_command_line(["check-dp", str(asked.path), "--draws", "200", "parameters=20"]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
