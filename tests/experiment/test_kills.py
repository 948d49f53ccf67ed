"""Ended at any point, a command loses nothing: started again it comes to the same table.

``make kill`` kills each twenty times and sends every signal; FL_PRIVACY_KILLS is the number, 1 where it is not set.
Then SIGTERM is the only signal, and ``make fuzz`` alone kills a sweep.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.folder import read_run
from tests.experiment.kills import SUBJECTS, finish, kill
from tests.experiment.runs import FEW_CANDIDATES, wait_until

KILLS = int(os.environ.get("FL_PRIVACY_KILLS", "1"))

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", SUBJECTS if KILLS > 1 else ("sweep",))
def test_killed_at_random_points_it_comes_to_the_same_table(name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    seconds = finish(subject, tmp_path / "whole")
    wanted = subject.table(tmp_path / "whole")

    seed = int(os.environ.get("FL_PRIVACY_KILL_SEED", time.time_ns() % 2**32))
    print(f"FL_PRIVACY_KILL_SEED={seed}")
    at = kill(subject, tmp_path / "killed", kills=KILLS, within=seconds, rng=random.Random(seed))

    print(f"{name}: killed after {', '.join(f'{t:.1f}' for t in at)} of {seconds:.1f} s")
    assert len(at) == KILLS
    for out in [path for path in tmp_path.glob("killed*") if path.is_dir()]:
        assert subject.table(out) == wanted, out.name


SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
SENT = tuple(SIGNALS) if KILLS > 1 else ("SIGTERM",)
ONE_WORKER = () if KILLS > 1 else ("--jobs", "1")
LONG = ("run", "federation.clients=2", "federation.rounds=100000", "victims=2", "attack=idlg")
LONG += ("attack.iterations=2", "intercept.rounds=first", "intercept.when=during", FEW_CANDIDATES)


def heed() -> None:
    """Undo, in the process that starts, what `nohup` or a background job of a shell made it ignore."""
    for name in SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def rounds(out: Path) -> int:
    return max((path.read_text().count('"kind": "round"') for path in out.glob("*/metrics.jsonl")), default=0)


@pytest.mark.parametrize("name", SENT)
def test_a_signal_ends_a_run_with_one_line_and_leaves_a_readable_folder(name: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fl_privacy", *LONG, f"out={tmp_path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed,  # noqa: PLW1509 (in one thread)
    )

    try:
        wait_until(lambda: process.poll() is not None or rounds(tmp_path) >= 2, seconds=900)
        assert process.poll() is None, "the run ended by itself"
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()

    assert process.returncode == SIGNALS[name]
    assert said.splitlines()[-1].startswith("interrupted; what was recorded is kept")
    assert "Traceback" not in said
    (folder,) = [path.parent for path in tmp_path.glob("*/metrics.jsonl")]
    assert len(read_run(folder).of_kind("round")) >= 2
    assert run_command_line(["report", str(folder)]) == 0


@pytest.mark.parametrize("name", SENT)
def test_a_signal_ends_a_sweep_with_its_workers(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*SUBJECTS["trade-off"].command(out), "federation.rounds=100000", *ONE_WORKER],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed,  # noqa: PLW1509 (in one thread)
    )
    try:
        wait_until(lambda: process.poll() is not None or rounds(out) >= 2, seconds=900)  # clients are at work
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=300)  # workers that went on would hold the pipe open
    finally:
        process.kill()

    assert process.returncode == SIGNALS[name]
    assert [line for line in said.splitlines() if line.strip()] == [
        "interrupted; what was done is kept, the same command goes on from there"
    ]
