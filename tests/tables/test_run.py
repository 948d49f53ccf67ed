"""A federation on a table, attacked: its page shows rows."""

import json
from pathlib import Path

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.folder import read_run
from fl_privacy.runs.folder.pictures import read_rows
from tests.tables.tables import frame

SMALL = ["model=table_mlp", "federation.clients=2", "federation.rounds=1", "victims=2"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tables") / "people.csv"
    frame().to_csv(path, index=False)
    return f"data.path={path}"


@pytest.fixture(scope="module")
def run(table: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    assert run_command_line(["run", "data=table", table, *SMALL, f"out={out}", "intercept.save=true"]) == 0
    return next(path.parent for path in out.glob("*/summary.json"))


def test_single_rows_are_proven(run: Path) -> None:
    recorded = read_run(run)
    assert recorded.summary.plain.certainties == {"proven": 2}
    assert recorded.summary.plain.metrics["cells_right"].mean == 1
    assert "psnr" not in recorded.summary.plain.metrics
    assert any("schema" in sentence for sentence in recorded.threat_model)


def test_the_page_shows_rows_for_their_owner_alone(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "2 of 2 attacked rows" in page and 'class="token right"' in page
    assert "<b>job " in page, "what is proven is certain"
    assert (
        "Without the update, 95 % of guesses get at most" in page
        and "without\u00a0the\u00a0update:\u00a0up\u00a0to" in page
    )
    (stored,) = (run / "reconstructions").glob("rows-*.json")
    assert stored.stat().st_mode & 0o077 == 0
    rows, problems = read_run(run).read_rows()
    assert len(rows) == 2 and not problems
    for pair in rows.values():
        assert pair.columns == ("age", "dose", "job", "city", "sex")
        assert pair.guess is not None and pair.original == pair.guess.cells


def test_a_shared_copy_has_no_rows(run: Path, tmp_path: Path) -> None:
    assert run_command_line(["report", str(run), "--share", str(tmp_path / "copy")]) == 0
    (copy,) = (tmp_path / "copy").rglob("report.html")
    assert 'class="token' not in copy.read_text() and not list(copy.parent.rglob("rows-*.json"))


def test_what_was_captured_is_attacked_again(run: Path, tmp_path: Path) -> None:
    assert run_command_line(["attack", f"captured={run}", f"out={tmp_path}"]) == 0
    (again,) = tmp_path.glob("*/summary.json")
    assert read_run(again.parent).summary.plain.metrics["cells_right"].mean == 1


@pytest.mark.parametrize(
    "change",
    [
        {"rows": None},
        {"columns": 3},
        {"rows": [{"id": "a", "image": 0, "original": ["1"], "guess": None, "right": [], "certain": []}]},
        {"rows": [{"id": "a", "image": 0}]},
    ],
)
def test_a_damaged_file_of_rows_is_a_line(run: Path, tmp_path: Path, change: dict[str, object]) -> None:
    (stored,) = (run / "reconstructions").glob("rows-*.json")
    (tmp_path / stored.name).write_text(json.dumps({**json.loads(stored.read_text()), **change}))
    _, (problem,) = read_rows(tmp_path)
    assert problem.startswith(f"{stored.name} can't be read") and "\n" not in problem


@pytest.mark.parametrize("defense", ["ats", "instahide", "dc", "spn", "split_fed", "refiner"])
def test_defenses_of_images_are_refused(
    table: str, tmp_path: Path, defense: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "data=table", table, *SMALL, f"defense={defense}", f"out={tmp_path}"]
    assert run_command_line(words) != 0
    said = capfd.readouterr().err
    assert "a table" in said and "Traceback" not in said


def test_what_is_not_of_tables_is_refused(table: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["server=imprint"], ["model=lenet"], ["data.target=nobody"]):
        assert run_command_line(["run", "data=table", table, *SMALL, *words, f"out={tmp_path}"]) != 0
        said = capfd.readouterr().err
        assert "expected" in said or "are a table" in said
        assert "Traceback" not in said


@pytest.mark.long
def test_noise_is_answered_and_pruning_trains(table: str, tmp_path: Path) -> None:
    short = ["attack=tableak", "attack.iterations=5", "attack.restarts=2", "batch_size=3", "page=false"]
    for number, defense in enumerate(("dp_noise", "pruning", "dp_sgd")):
        words = [f"defense={defense}", "threat_model=adaptive", f"out={tmp_path / str(number)}", "baseline=false"]
        assert run_command_line(["run", "data=table", table, *SMALL, *short, *words]) == 0
        (done,) = (tmp_path / str(number)).glob("*/summary.json")
        assert read_run(done.parent).summary.adaptive is not None


def test_several_local_steps_are_replayed(table: str, tmp_path: Path) -> None:
    short = ["attack=tableak", "attack.iterations=5", "attack.restarts=2", "batch_size=3", "page=false"]
    words = ["federation=fedavg", "federation.plan.epochs=null", "federation.plan.steps=3", f"out={tmp_path}"]
    assert run_command_line(["run", "data=table", table, *SMALL, *short, *words]) == 0


def test_members_and_attributes_are_inferred(table: str, tmp_path: Path) -> None:
    words = ["data.attribute_column=sex", "inference=attribute", "attack=none", "page=false", f"out={tmp_path}"]
    assert run_command_line(["run", "data=table", table, *SMALL, *words]) == 0
