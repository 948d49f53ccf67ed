"""A user's own modules are found in the working directory, and stand in for nobody else's."""

import subprocess
import sys
from pathlib import Path

import pytest

OWN = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, *, in_channels: int, image_size: int, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """As the installed command does, which has not the working directory on its path."""
    script = "from fl_privacy.cli.main import main; main()"
    command = [
        sys.executable,
        "-P",
        "-c",
        script,
        "attack",
        "victims=1",
        *overrides,
        "attack=idlg",
        "attack.iterations=1",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_module_in_the_working_directory_is_found_and_other_files_there_stand_in_for_no_package(
    tmp_path: Path,
) -> None:
    """Without a page the last line names the folder."""
    (tmp_path / "own_nets.py").write_text(OWN)
    for name in ("torchvision", "piq", "tenseal", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file was run')")
    done = run(tmp_path, "model=custom", "model._target_=own_nets.Net", "page=false")
    assert done.returncode == 0, done.stderr
    assert "wrong file" not in done.stderr
    folder = tmp_path / done.stdout.splitlines()[-1]
    assert (folder / "metrics.jsonl").is_file() and not (folder / "report.html").exists()


def test_a_module_that_is_nowhere_is_one_line(tmp_path: Path) -> None:
    """Hydra logs a failed import in lines of its own, beside the error that it raises."""
    done = run(tmp_path, "model=custom", "model._target_=no_such_nets.Net")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: model._target_ is expected to be an import path")
