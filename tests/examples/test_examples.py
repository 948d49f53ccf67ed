"""What a user copies from ``examples/`` runs as it is."""

import ast
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from tests.experiment.runs import FEW_CANDIDATES, Run, undrawn

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ELSEWHERE = {
    *("flower_quickstart", "flower_numpy_client", "privacy_test"),
    *("audited-quickstart", "defended-quickstart"),
}
"""Run by ``tests/flower/test_audit.py``, ``tests/regression/test_measurement.py`` and ``test_hub_apps.py``."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with copies of the scripts."""
    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_example_is_run_by_a_test() -> None:
    found = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    here = {"attack_in_20_lines.py", "own_attack.py", "own_defense.py", "quickstart_attack.ipynb"}
    assert found == ELSEWHERE | here


@pytest.mark.long
def test_twenty_lines_read_digits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = here / "attack_in_20_lines.py"
    lines = [line for line in script.read_text().split('"""')[2].splitlines() if line.strip()]
    assert len(lines) <= 20
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6 and all(float(line.split()[3]) > 30 for line in said)
    with Image.open(here / "attack.png") as picture:
        assert picture.width > 2 * picture.height


def status_of(script: Path, *arguments: str) -> int | str | None:
    sys.argv = [script.name, *arguments]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code


def test_an_attack_of_one_s_own_reads_digits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert status_of(here / "own_attack.py", "victims=2", FEW_CANDIDATES) == 0
    (folder,) = (here / "runs").glob("attack-*")
    assert "first_layer" in folder.name
    assert Run(0, (str(folder),)).json("summary.json")["metrics"]["psnr"]["mean"] > 40
    sys.modules.pop("own_attack", None)


@pytest.mark.long
def test_a_defense_of_one_s_own_hides_digits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["own_defense.py", "victims=2", "attack.iterations=8", FEW_CANDIDATES])
    with undrawn():
        runpy.run_path(str(here / "own_defense.py"), run_name="__main__")
    read = {}
    for folder in (here / "runs").glob("attack-*"):
        done = Run(0, (str(folder),))
        defense = "shuffled_signs" if "shuffled_signs" in folder.name else "none"
        read.setdefault(defense, []).append(done.json("summary.json")["metrics"]["psnr"]["mean"])
    assert len(read["shuffled_signs"]) == 2
    assert max(read["shuffled_signs"]) < read["none"][0] - 10
    sys.modules.pop("own_defense", None)


def notebook_of_few_iterations() -> Any:
    written = (EXAMPLES / "quickstart_attack.ipynb").read_text()
    assert written.count("iterations=60)") == 2
    return nbformat.reads(written.replace("iterations=60)", "iterations=6)"), as_version=4)


@pytest.mark.long
def test_the_notebook_s_cells_run_and_show_pictures() -> None:
    """With a tenth of its iterations."""
    names, shown = dict[str, Any](), list[Any]()
    for cell in notebook_of_few_iterations().cells:
        if cell.cell_type == "code":
            tree = ast.parse(cell.source)
            last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell", "exec"), names)
            shown += [eval(compile(last, "cell", "eval"), names)] if last else []
    assert sum(isinstance(value, Image.Image) for value in shown) == 2


@pytest.mark.fuzz
def test_the_notebook_runs_to_its_end(tmp_path: Path) -> None:
    notebook = notebook_of_few_iterations()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    pictures = [o for cell in cells for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
