"""The mode of batch norm in what is attacked, and that every page says it."""

import json
from pathlib import Path

import pytest
import torch

from fl_privacy.report import write_report
from tests.experiment.runs import Run, run

SMALL = ("data.image_size=16", "victims=2", "attack.iterations=2")
NORMED = (*SMALL, "model=resnet10", "model.width=2")
EVALUATED = "In the attacked uploads, batch norm ran in evaluation mode"
TRAINED = "In the attacked uploads, batch norm ran in training mode"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    out = tmp_path_factory.mktemp("runs")
    federation = ("federation.clients=2", "federation.rounds=1", "federation.plan.batch_size=8", "intercept.save=true")
    return {
        "trained": run("run", *NORMED, *federation, out=out),
        "default": run("attack", *NORMED, out=out),
        "train": run("attack", *NORMED, "federation.plan.probe_batch_norm=train", out=out),
        "without": run("attack", *SMALL, "model=lenet", out=out),
    }


def test_it_is_in_evaluation_mode_unless_asked_otherwise(runs: dict[str, Run]) -> None:
    modes = {name: made.json("summary.json")["batch_norm"] for name, made in runs.items()}
    assert modes == {"trained": ["eval"], "default": ["eval"], "train": ["train"], "without": []}
    (plan,) = {
        json.dumps(json.loads(file.read_text())["plan"])
        for file in (runs["trained"].path / "captures").glob("round-*/client-*/*.json")
    }
    assert json.loads(plan)["batch_norm"] == "eval"
    psnr = [[score for *_, score in runs[name].scores()] for name in ("default", "train")]
    assert not torch.allclose(*map(torch.tensor, psnr))


def test_a_victim_that_can_not_be_normalized_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (*NORMED, "data.image_size=8", "federation.plan.probe_batch_norm=train")  # ends as one pixel
    assert run("attack", *settings, out=tmp_path).status == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "probe_batch_norm=eval" in line


def test_pages_say_it(runs: dict[str, Run], tmp_path: Path) -> None:
    page = {name: (made.path / "report.html").read_text() for name, made in runs.items()}
    assert EVALUATED in page["trained"] and EVALUATED in page["default"] and TRAINED in page["train"]
    assert "batch norm" not in page["without"].lower()
    both = write_report([runs["default"].path, runs["train"].path], tmp_path / "both.html").read_text()
    assert "batch norm ran in evaluation mode" in both and "or training mode" in both
    threats = {name: " ".join(made.json("threat_model.json")) for name, made in runs.items()}
    assert "Batch norm of training is in training mode" in threats["trained"]
    assert "that of the attacked batches is in evaluation mode" in threats["trained"]
    assert "that of the attacked batches is in training mode as well" in threats["train"]
    assert "atch norm" not in threats["without"]
