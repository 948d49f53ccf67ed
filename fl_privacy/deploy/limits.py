"""A command held to one core and so much memory, as on a small device."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")
_WATCH_SECONDS = 0.02
_POWER = Path("/sys/class/powercap")


@dataclass(frozen=True, kw_only=True)
class Held:
    """What became of a command that was held to its limits.

    Attributes:
        status: its exit status; negative where a signal ended it.
        out: what it printed.
        complaint: what it printed as errors.
        peak: bytes of its own, at most; pages of the files that it reads are not counted, the system drops them.
        too_large: whether it was ended for its memory.
        held_by: who held it to its memory, in words.
    """

    status: int
    out: str
    complaint: str
    peak: int
    too_large: bool
    held_by: str


def run_limited(command: Sequence[str], *, memory: int, core: int, environment: Mapping[str, str]) -> Held:
    """Run ``command`` on the core numbered ``core`` with at most ``memory`` bytes.

    A memory cgroup holds it where this user may make one. Otherwise this process looks every 20 ms and ends it; a peak
    between two looks is missed then. (``ulimit -v`` counts addresses, most of which PyTorch never touches.)
    """
    with _cgroup(memory) as group, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as complaint:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENTER, str(core), str(group or ""), *command],
            stdout=out,
            stderr=complaint,
            env=dict(environment),
        )
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, _own_bytes(process.pid))
                if group is None and peak > memory:
                    process.kill()
                time.sleep(_WATCH_SECONDS)
        finally:
            process.kill()
            process.wait()
        too_large = peak > memory if group is None else _killed_for_memory(group)
        out.seek(0)
        complaint.seek(0)
        return Held(
            status=process.returncode,
            out=out.read(),
            complaint=complaint.read(),
            peak=peak,
            too_large=too_large,
            held_by="its parent" if group is None else "a memory cgroup",
        )


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
    """What the processor packages have used (RAPL), which starts again at 0 now and then; ``None`` if nobody says."""
    try:
        counters = [
            int((zone / "energy_uj").read_text())
            for zone in _POWER.glob("intel-rapl:?")
            if (zone / "name").read_text().startswith("package")  # the zone of the whole machine holds them as well
        ]
    except OSError:
        return None
    return sum(counters) / 1e6 if counters else None


@contextmanager
def _cgroup(memory: int) -> Iterator[Path | None]:
    """A group of processes with ``memory`` bytes together, gone afterwards; ``None`` where none can be made."""
    for root, limit in ((_CGROUP / "memory", "memory.limit_in_bytes"), (_CGROUP, "memory.max")):
        group = root / f"fl-privacy-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(memory))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            with suppress(OSError):  # its last process may not be gone yet
                group.rmdir()
        return
    yield None


def _killed_for_memory(group: Path) -> bool:
    for name in ("memory.oom_control", "memory.events"):
        if (file := group / name).exists():
            told = dict(line.split() for line in file.read_text().splitlines())
            return int(told.get("oom_kill", 0)) > 0
    return False


def _own_bytes(pid: int) -> int:
    """Anonymous memory of a process; 0 once it has gone. Where the kernel does not tell, all that is resident."""
    try:
        told = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    value = found.get("RssAnon") or found.get("VmRSS")
    return int(value.split()[0]) * 1024 if value else 0
