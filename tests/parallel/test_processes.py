"""Parts of an attack by all cores: the same bits however many, errors and warnings as in one process, no orphans."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from fl_privacy.attacks import Progress, idlg, no_progress
from fl_privacy.errors import UserError
from fl_privacy.federation import processes
from fl_privacy.federation.parallel import attack_by_all_cores, victims_of_a_part
from fl_privacy.federation.processes import Done, in_processes
from fl_privacy.types import Observation, Reconstruction
from tests.attacks.victims import observations, smooth_net
from tests.selection import few


@pytest.fixture(autouse=True, scope="module")
def started_at_once():
    """Start other processes whatever they save, and end them after these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_WATCHED", 0.0)
        patch.setattr(processes, "STARTING", -1e9)
        patch.setattr(processes, "STARTED", -1e9)
        patch.setattr(processes, "_LOOK_EVERY", 0.0)
        yield
    processes.end_workers()


def where(number: int, done: Done) -> tuple[int, int, int]:
    """Return the number, the process and its threads, a while later."""
    for step in range(5):
        done(step / 5)
        time.sleep(0.02)
    return number, os.getpid(), torch.get_num_threads()


def test_parts_are_done_by_several_processes_of_one_thread_and_come_back_in_order() -> None:
    shares: list[float] = []
    done = in_processes([partial(where, n) for n in range(40)], weights=[1.0] * 40, processes=2, report=shares.append)
    assert [number for number, _, _ in done] == list(range(40))
    assert os.getpid() in (here := {process for _, process, _ in done}) and len(here) == 2
    assert {threads for _, _, threads in done} == {1}
    assert shares == sorted(shares) and shares[-1] == 1.0


def says(number: int, done: Done) -> int:
    warnings.warn("slow model", stacklevel=1)
    logging.getLogger("fl_privacy.somewhere").warning("part %d", number)
    return where(number, done)[0]


@pytest.mark.long
def test_what_is_warned_and_logged_elsewhere_is_said_here(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(UserWarning, match="slow model"):
        in_processes([partial(says, n) for n in range(2)], weights=[1.0] * 2, processes=2)
    assert {"part 0", "part 1"} <= set(caplog.messages)


def draws(observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress) -> list[Reconstruction]:
    return [Reconstruction(id=o.id, batch=None, loss=float(torch.rand(()))) for o in observations]


@pytest.mark.long
def test_what_an_attack_draws_from_the_global_stream_does_not_depend_on_the_processes(monkeypatch) -> None:
    monkeypatch.setattr("fl_privacy.federation.parallel.victims_of_a_part", lambda observations: 1)
    seen = observations(smooth_net(), 4)
    one, two = ([r.loss for r in attack_by_all_cores(draws, seen, seed=0, processes=n)] for n in (1, 2))
    assert one == two and len(set(one)) == 4


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.fuzz)])
def test_an_attack_gives_the_same_bits_by_one_and_several_processes(processes: int, monkeypatch) -> None:
    attack = idlg(iterations=4, restarts=1)
    monkeypatch.setattr("fl_privacy.federation.parallel.victims_of_a_part", lambda observations: 2)
    seen, shares = observations(smooth_net(), 9), []
    found = [
        attack_by_all_cores(attack, seen, seed=3, processes=n, progress=lambda done, total: shares.append(done / total))
        for n in (1, processes)
    ]
    assert [one.id for one in found[1]] == [one.id for one in seen]
    for first, other in zip(*found, strict=True):
        assert torch.equal(other.batch.inputs, first.batch.inputs) and other.history == first.history
    assert max(shares) == 1.0


def no_other_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget processes that run already, and fail where one is started."""
    monkeypatch.setattr(processes, "worker_processes", None)
    monkeypatch.setattr(processes, "_pool", processes._Pool())


def test_a_single_process_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    no_other_starts(monkeypatch)
    done = in_processes([partial(where, n) for n in range(3)], weights=[1.0] * 3, processes=1)
    assert {process for _, process, _ in done} == {os.getpid()}


def test_what_is_over_in_seconds_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    no_other_starts(monkeypatch)
    monkeypatch.setattr(processes, "STARTING", 4.0)
    in_processes([partial(where, n) for n in range(3)], weights=[1.0] * 3, processes=2)


def ends_early(number: int, done: Done) -> int:
    for share in (0.1, 0.12):
        time.sleep(0.3)
        done(share)
    return number


@pytest.mark.parametrize("unsure", [4.0, 2.0])
def test_what_may_end_early_starts_others_only_where_much_is_saved(
    unsure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_other_starts(monkeypatch)
    monkeypatch.setattr(processes, "_WATCHED", 0.2)
    monkeypatch.setattr(processes, "STARTING", 1.5)  # of two parts of 5 seconds each, as they say, 5 would be saved
    monkeypatch.setattr(processes, "_UNSURE", unsure)
    assert in_processes([partial(ends_early, n) for n in range(2)], weights=[1.0] * 2, processes=2) == [0, 1]


def fails(number: int, error: type[Exception], done: Done) -> int:
    if number:
        raise error("attack.size is expected to be even, but got 3; set attack.size=4.")
    done(0.0)
    time.sleep(0.5)
    return number


class OddError(Exception):
    """An exception that can't be sent: it is built of two things."""

    def __init__(self, text: str, more: int = 0, *, kind: object = None) -> None:
        super().__init__(text)
        self.kind = lambda: kind


@pytest.mark.parametrize("error", few([UserError, OddError], 1))
def test_the_error_of_a_part_elsewhere_is_that_of_one_here(error: type[Exception]) -> None:
    parts = [partial(fails, n, error) for n in (0, 1)]
    with pytest.raises(Exception, match="to be even") as raised:
        in_processes(parts, weights=[1.0, 1.0], processes=2)
    assert raised.type.__name__ == error.__name__


def killed(parent: int, number: int, done: Done) -> int:
    done(0.0)
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    return number


@pytest.mark.long
def test_a_process_that_is_killed_costs_no_part(caplog: pytest.LogCaptureFixture) -> None:
    parts = [partial(killed, os.getpid(), n) for n in range(3)]
    assert in_processes(parts, weights=[1.0] * 3, processes=2) == [0, 1, 2]
    assert "this one does its part" in caplog.text


def test_what_can_not_be_sent_is_done_here() -> None:
    held = threading.Lock()

    def part(done: Done) -> int:
        done(0.0)
        assert not held.locked()
        return os.getpid()

    assert in_processes([part, part], weights=[1.0, 1.0], processes=2) == [os.getpid()] * 2


def test_parts_are_larger_the_less_a_victim_takes() -> None:
    small = observations(smooth_net(), 1)
    large = torch.nn.Sequential(torch.nn.Conv2d(2, 512, 7, padding=3), torch.nn.Flatten(), torch.nn.LazyLinear(5))
    large(torch.zeros(1, 2, 8, 8))
    assert victims_of_a_part(small) == 32 > victims_of_a_part(observations(large.double(), 1)) >= 1


ORPHANS = """
import os, signal, sys, time
from functools import partial
from fl_privacy import processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever starts tests in the background takes away
from tests.parallel.test_processes import slow
processes._WATCHED, processes.STARTING, processes._LOOK_EVERY = 0.0, -1e9, 0.0
processes.in_processes([partial(slow, sys.argv[1], n) for n in range(2)], weights=[1.0, 1.0], processes=2)
"""


def slow(folder: str, number: int, done: Done) -> None:
    (Path(folder) / str(os.getpid())).touch()
    for _ in range(1200):
        done(0.0)
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.fuzz), signal.SIGKILL])
def test_nothing_is_left_of_a_command_that_is_ended(number: int, tmp_path) -> None:
    command = [sys.executable, "-c", ORPHANS, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(process.pid, number)
        process.wait(60)
    until(lambda: not any(alive(int(one.name)) for one in tmp_path.iterdir()))


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def until(so: object, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
