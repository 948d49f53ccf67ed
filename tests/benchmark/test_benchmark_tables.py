"""A track of rows is ranked by cells, and claims no malicious server that nobody tried."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from fl_privacy.cli import studies
from fl_privacy.cli.main import run_command_line
from fl_privacy.report.benchmark_page import SCHEMA
from fl_privacy.runs import study as study_results
from fl_privacy.runs.config.study import AttackCell
from fl_privacy.runs.folder import Attacker
from fl_privacy.runs.study import Job
from tests.benchmark.tracks import write_track
from tests.experiment.runs import run

ROWS = """
version: 1
about: Rows.
settings: [data=breast_cancer, model=table_mlp, federation.clients=2, page=false]
attack: [attack=auto, attack.evaluations=25, threat_model=adaptive]
early: 1
trainings:
  FedSGD: [federation=fedsgd, federation.rounds=2, federation.plan.batch_size=8, evaluate_every=2]
uploads:
  one row: {training: FedSGD, states: [untrained], attack: [victims=2], servers: {}, server_states: []}
accuracy_loss: [5, 100]
defenses:
  Pruning: [defense=pruning, "defense.rate=0.99"]
left_out: {}
evaluators: {}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    def run_here(jobs: Sequence[Job], processes: int, *, on_done: Callable[[Job, str | None], None]) -> None:
        for job in jobs:
            on_done(job, studies._do(job))

    place = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studies, "run_in_processes", run_here)
        done = run("benchmark", write_track(place, ROWS), out=place / "runs")
    assert done.status == 0
    yield done.path


def figures(page: Path) -> Any:
    found = json.loads(page.with_name("benchmark.json").read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(found)
    return found


def test_rows_that_were_read_are_known_and_ranked(page: Path) -> None:
    found = figures(page)
    assert [setting["incomplete"] for setting in found["settings"]] == [None] * 2
    undefended = found["settings"][0]["worst"]["adaptive"]
    assert undefended["metric"] == "cells_right" and undefended["mean"] == 1 and undefended["read"] == 2
    assert "cells_right" in found["settings"][0]["readings"][0]["metrics"]
    assert {board["threat"] for board in found["boards"]} == {"honest", "adaptive"}
    assert all(setting["worst"]["malicious"] is None for setting in found["settings"])


def test_the_page_speaks_of_rows_and_cells(page: Path) -> None:
    text = page.read_text()
    assert (
        "Cells right, upper end" in text
        and "in which the largest share of rows was reconstructed" in text
        and "not measured" not in text
    )
    assert "PSNR" not in text and "dB" not in text and "alicious" not in text
    assert not any(word in text for word in ("of images", "attacked image", "images reconstructed"))


def test_advice_claims_no_server_that_nobody_tried(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["advise", "--table", str(page.parent), "accuracy_loss=100"]
    assert run_command_line([*asked, "threat=adaptive"]) == 0
    said = capfd.readouterr().out
    assert "rows reconstructed" in said and "Nothing is recommended" in said and "malicious" not in said
    assert run_command_line([*asked, "threat=malicious"]) == 2
    assert "one that was measured, honest or adaptive" in " ".join(capfd.readouterr().err.split())


def test_an_attack_that_failed_on_all_victims_is_a_problem_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {Path("broken"): {Attacker.PLAIN: "no memory"}, Path("fine"): {}, Path("theirs"): {Attacker.PLAIN: "none"}}
    monkeypatch.setattr(study_results, "failed_attackers", told.__getitem__)
    names = ("broken", "fine", "theirs", "open")
    cells = [
        AttackCell(uploads=name, state="untrained", server="imprint" if name == "theirs" else "") for name in names
    ]
    jobs = [SimpleNamespace(folder=Path(name), finished=name != "open") for name in names]
    planned = SimpleNamespace(attacks=dict(zip(cells, jobs, strict=True)))
    plan: Any = SimpleNamespace(points=[planned])
    assert study_results._failures(plan) == {"broken": "no memory"}
