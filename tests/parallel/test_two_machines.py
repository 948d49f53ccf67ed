"""An attack and a training on two machines go on when one is lost, and come to the same; ``make test-cluster``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.cluster
def test_a_lost_machine_changes_no_result() -> None:
    pytest.importorskip("ray")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.two_machines"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    attack, training = found["attack"], found["training"]
    assert len(attack["lost_at"]) == 1 and attack["lost_at"][0] < 1
    assert attack["failures"] == [None] * 6
    assert attack["same"] == [True] * 6
    assert training["asked_again"] >= 1
    assert training["excluded"] == [{}, {}, {}]
