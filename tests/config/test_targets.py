"""A user's own modules are found in the working directory, and stand in for nobody else's."""

import subprocess
import sys
from pathlib import Path

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


def test_a_module_in_the_working_directory_is_found_and_other_files_there_stand_in_for_no_package(
    tmp_path: Path,
) -> None:
    (tmp_path / "own_nets.py").write_text(OWN)
    for name in ("torchvision", "piq", "tenseal", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file was run')")
    done = run(tmp_path, "model=custom", "model._target_=own_nets.Net")
    assert done.returncode == 0, done.stderr
    assert "wrong file" not in done.stderr
