"""What jobs in other processes are at is said while they last."""

import io
import os
import time

import pytest
from rich.console import Console

from fl_privacy.cli import console as underway
from fl_privacy.cli.console import Underway, WrittenMonitor
from fl_privacy.progress import counted
from fl_privacy.runs.folder import ongoing
from fl_privacy.runs.folder.ongoing import PROGRESS, Ongoing, read_ongoing
from tests.results.runs import round_report


def trained(folder, rounds):
    """Write a training of two clients and ``rounds`` rounds, of which the last is not over."""
    folder.mkdir(exist_ok=True)
    monitor = WrittenMonitor(folder)
    with monitor.training(rounds):
        for number in range(1, rounds):
            for _ in counted("client", range(2)):
                pass
            monitor.round_done(round_report(number), None, None)
        for _ in counted("client", range(2)):
            for _ in counted("condensing images", range(4)):
                pass


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(ongoing, "TELL_EVERY", 0.0)
    monkeypatch.setattr(underway, "LOOK_EVERY", 0.01)


def test_a_training_writes_down_its_round_and_step(tmp_path):
    trained(tmp_path, 3)
    told = read_ongoing(tmp_path)
    assert told.what == "Training, round 3/3, client 2/2, condensing images 4/4"
    assert told.share == pytest.approx((2 + (1 + 3 / 4) / 2) / 3, abs=1e-3)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_job_its_step_and_the_time_left_are_said(tmp_path, monkeypatch, terminal):
    monkeypatch.setattr("fl_privacy.progress.BETWEEN_LINES", 0)
    jobs, written = [tmp_path / "first", tmp_path / "second"], io.StringIO()
    shown = Underway("Training", jobs, Console(file=written, force_terminal=terminal, width=200))
    with shown.shown():
        trained(jobs[0], 2)
        time.sleep(0.3)
        assert shown.ended(jobs[0]).startswith("1/2 finished: first, about ")
    text = written.getvalue()
    assert "first: Training, round 2/2, client 2/2, condensing images 4/4" in text
    if not terminal:
        assert text.startswith("Training, 0/2 finished; first: ") and " left\n" in text


def test_the_time_left_is_that_of_the_longest_job(tmp_path, monkeypatch):
    """Three of four jobs took 1 s each; the last has done a tenth of its work in 100 s."""
    now = [0.0]
    monkeypatch.setattr("fl_privacy.progress.time.monotonic", lambda: now[0])
    jobs = [tmp_path / str(number) for number in range(4)]
    states = {jobs[3]: Ongoing("Training", 0.1, 100.0)}
    monkeypatch.setattr(underway, "read_ongoing", states.get)
    shown = Underway("Training", jobs, Console(file=io.StringIO(), force_terminal=True))
    jobs[3].mkdir()
    (jobs[3] / PROGRESS).touch()
    os.utime(jobs[3] / PROGRESS, (time.time() + 1, time.time() + 1))
    for now[0], folder in zip((1.0, 2.0, 100.0), jobs, strict=False):
        line = shown.ended(folder)
    assert line == "3/4 finished: 2, about 15:00 min left"


def test_what_a_killed_process_had_written_is_not_said(tmp_path):
    trained(tmp_path, 2)
    os.utime(tmp_path / PROGRESS, (1, 1))
    written = io.StringIO()
    with Underway("Training", [tmp_path], Console(file=written, force_terminal=True, width=200)).shown():
        time.sleep(0.1)
    assert "round" not in written.getvalue()
