"""What ``make`` runs is there."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.test_shape import ROOT


@pytest.mark.long
@pytest.mark.parametrize("target", ["kill", "test-deploy", "test-gpu", "test-cluster"])
def test_a_target_finds_its_tests(target: str) -> None:
    """Long ones are left out where nobody asks for them, and a target of long ones alone finds none."""
    (line,) = re.findall(
        rf"^{target}:.*\n\t.*\$\(BIN\)/pytest (tests/.*)$",
        (ROOT / "Makefile").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *shlex.split(line)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "/test_" in done.stdout
