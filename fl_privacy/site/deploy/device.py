"""Cost of a client's round on a small device, with one core and limited memory (Refiner, Appendix O)."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError, say
from fl_privacy.runs.folder import read_run
from fl_privacy.runs.folder.ongoing import CONFIG, IDENTITY, METRICS, expect_finished, is_aside, is_finished
from fl_privacy.runs.folder.records import RecordWriter
from fl_privacy.site.gate.warden import figures

MIB = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")
_WATCH_SECONDS = 0.02
_POWER = Path("/sys/class/powercap")


@dataclass(frozen=True)
class LimitedOutcome:
    """Result of a command run within limits; ``peak``: most memory that it used, in bytes, without mapped files."""

    status: int
    out: str
    complaint: str
    peak: int
    too_large: bool
    held_by: str


def run_limited(command: Sequence[str], *, memory: int, core: int, environment: Mapping[str, str]) -> LimitedOutcome:
    """Run ``command`` on one ``core`` (number) with at most ``memory`` bytes.

    The limit is a cgroup's if allowed; otherwise memory is polled, and short peaks may be missed.
    """
    with _cgroup(memory) as group, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as complaint:
        entered = [sys.executable, "-c", _ENTER, str(core), str(group or ""), *command]
        process, peak = subprocess.Popen(entered, stdout=out, stderr=complaint, env=dict(environment)), 0
        try:
            while process.poll() is None:
                peak = max(peak, _own_bytes(process.pid))
                if group is None and peak > memory:
                    process.kill()
                time.sleep(_WATCH_SECONDS)
        finally:
            process.kill()
            process.wait()
        too_large = peak > memory
        if group is not None:
            files = (group / "memory.oom_control", group / "memory.events")
            counts = next((file.read_text() for file in files if file.exists()), "")
            too_large = int(dict(line.split() for line in counts.splitlines()).get("oom_kill", 0)) > 0
        out.seek(0)
        complaint.seek(0)
        by = "its parent" if group is None else "a memory cgroup"
        return LimitedOutcome(process.returncode, out.read(), complaint.read(), peak, too_large=too_large, held_by=by)


_ENTER = """
import os, sys
core, group, *command = sys.argv[1:]
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(core)})
if group:
    with open(os.path.join(group, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
os.execvp(command[0], command)
"""


def joules_so_far() -> float | None:
    """Return the energy in joules that processors have used, by RAPL counters, which overflow; ``None`` if missing."""
    try:
        counters = [
            int((zone / "energy_uj").read_text())
            for zone in _POWER.glob("intel-rapl:?")
            if (zone / "name").read_text().startswith("package")  # the zone of the whole machine includes them
        ]
    except OSError:
        return None
    return sum(counters) / 1e6 if counters else None


@contextmanager
def _cgroup(memory: int) -> Iterator[Path | None]:
    for root, limit in ((_CGROUP / "memory", "memory.limit_in_bytes"), (_CGROUP, "memory.max")):
        group = root / f"fl-privacy-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        made = False
        with suppress(OSError):
            group.mkdir()
            made = bool((group / limit).write_text(str(memory)))
        try:
            if made:
                yield group
                return
        finally:
            with suppress(OSError):  # its last process may not be gone yet
                group.rmdir()
    yield None


def _own_bytes(pid: int) -> int:
    status = dict[str, int]()
    with suppress(OSError):  # gone
        status = figures(Path(f"/proc/{pid}/status").read_bytes())
    return 1024 * (status.get("RssAnon") or status.get("VmRSS", 0))  # resident memory without an anonymous part


ENOUGH_SECONDS = 20.0  # CPU seconds of a round above which it is not repeated


def measure_nodes(
    runs: Sequence[Path], *, memory: int, core: int | None = None, repeats: int = 3, trust: Sequence[str] = ()
) -> Iterator[str]:
    """Measure time, memory and energy of a client's round within limits, for each of ``runs``; add them to its records.

    Yield a line on each run. ``UserError`` if a folder has no run, or if a client fails for another reason than its
    memory.

    Args:
        runs: folders of finished runs or sweeps.
        memory: limit in bytes.
        core: number of the core; ``None`` takes the first that this process may use.
        repeats: largest number of rounds, whose medians are recorded.
        trust: import paths that settings may name in addition to registered ones.
    """
    if repeats < 1:
        raise UserError(f"--repeats is expected to be at least 1, but got {repeats}; try 3.")
    if memory < 128 * MIB:
        raise UserError(f"--memory is expected to be at least 128 MiB, but got {memory / MIB:g}; try 1024.")
    one = min(os.sched_getaffinity(0)) if core is None and hasattr(os, "sched_getaffinity") else core or 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for run in [run for folder in runs for run in _runs_in(folder)]:
        command = [sys.executable, "-m", "fl_privacy.site.deploy.device", str(run.resolve()), str(repeats), *trust]
        ended = run_limited(command, memory=memory, core=one, environment=environment)
        if ended.too_large:
            _append(run, fits=False, memory=memory, peak_bytes=ended.peak, held_by=ended.held_by)
            yield f"{run.name}: does not fit into {memory / MIB:g} MiB"
            continue
        if ended.status:
            why = (ended.complaint.strip().splitlines() or [f"status {ended.status}"])[-1]
            raise UserError(f"A client of {run} is expected to train, but failed ({why}); choose another run.")
        cost = json.loads(ended.out.splitlines()[-1])
        _append(run, fits=True, memory=memory, peak_bytes=ended.peak, held_by=ended.held_by, **cost)
        yield f"{run.name}: {cost['cpu_seconds']:.3g} CPU s a round, {ended.peak / MIB:.0f} MiB at most"


def _runs_in(folder: Path) -> list[Path]:
    if (folder / IDENTITY).is_file():
        if read_run(folder).identity.config.get("command") != "run":
            raise UserError(f"{folder} is expected to be a run of `fl-privacy run`, but is another; name a run.")
        expect_finished(folder)
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/run.json") if not is_aside(path.parent))
    trained = [path for path in found if is_finished(path) and read_run(path).identity.config.get("command") == "run"]
    if not trained:
        raise UserError(f"{folder} is expected to hold runs that trained, but holds none; give what `run` printed.")
    return trained


def _one_client(run: Path, repeats: int, trust: Sequence[str]) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    from fl_privacy.defenses import ClientState  # noqa: PLC0415
    from fl_privacy.federation import public_state  # noqa: PLC0415
    from fl_privacy.runs.build import clients_of  # noqa: PLC0415
    from fl_privacy.runs.config import RunSettings  # noqa: PLC0415
    from fl_privacy.runs.config.untrusted import registered_run  # noqa: PLC0415

    torch.set_num_threads(1)
    settings = registered_run(run / CONFIG, trust)
    del settings["command"]
    client = clients_of(RunSettings.of(settings))[0]
    sent, state = public_state(client.model, client.defense), ClientState()
    rounds = []
    for round in range(repeats):
        joules, cpu, wall = joules_so_far(), time.process_time(), time.perf_counter()
        client.update(sent, state, round=round)
        after = joules_so_far()
        used = after - joules if after is not None and joules is not None and after >= joules else None
        rounds.append((time.process_time() - cpu, time.perf_counter() - wall, used))
        if rounds[0][0] > ENOUGH_SECONDS:
            break
    joules_used = [used for *_, used in rounds if used is not None]
    return {
        "cpu_seconds": statistics.median(cpu for cpu, *_ in rounds),
        "seconds": statistics.median(wall for _, wall, _ in rounds),
        "joules": statistics.median(joules_used) if joules_used else None,
        "repeats": len(rounds),
    }


def _append(run: Path, **measured: float | str | bool | None) -> None:
    expect_finished(run)
    missing = [name for name in ("cpu_seconds", "seconds", "joules", "repeats") if name not in measured]
    with closing(RecordWriter(run / METRICS)) as records:
        records.append({"kind": "node", **measured, **dict.fromkeys(missing)})


if __name__ == "__main__":
    say(json.dumps(_one_client(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
