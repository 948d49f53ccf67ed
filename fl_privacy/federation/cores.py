"""Count the cores that this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

LEFT = "FL_PRIVACY_CORES"  # environment variable: most cores that a command leaves to each worker

_GROUPS = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    paid, left = min(quotas(_GROUPS, _MOUNTED), default=bound), os.environ.get(LEFT, "")
    return max(1, min(bound, math.ceil(paid), int(left) if left.isdigit() else bound))


def processes_that_fit(bytes_each: int, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the number of processes of ``bytes_each`` for which cores and free memory suffice, at least 1."""
    try:
        figures = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = 1024 * int(figures["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return usable_cores()
    return max(1, min(usable_cores(), free // bytes_each))


def shared_among(processes: int) -> dict[str, str]:
    """Return environment variables that give each of ``processes`` an equal part of this process's cores."""
    return {LEFT: str(max(1, usable_cores() // max(1, processes)))}


def quotas(groups: Path, mounted: Path) -> Iterator[float]:
    """Yield the CPU limits of this process's control groups and of their parents.

    ``groups``: file that lists the groups (``/proc/self/cgroup``). ``mounted``: folder of all control groups.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = [mounted / name for name in ("cpu", "cpu,cpuacct")] if controllers else [mounted, mounted / "unified"]
        below = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        yield from (found for root in roots for folder in below if (found := _quota(root / folder)) is not None)


def _quota(folder: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            numbers = [number for name in names for number in (folder / name).read_text().split()]
        except OSError:
            continue
        if len(numbers) == 2 and numbers[0].isdigit() and numbers[1].isdigit() and int(numbers[1]):
            return int(numbers[0]) / int(numbers[1])
    return None


class Tally:
    """Number of attacked examples finished so far, summed over the processes of an attack."""

    def __init__(self) -> None:
        self._done: dict[int, float] = {}

    def tell(self, part: int, done: float) -> None:
        self._done[part] = done

    def total(self) -> float:
        return sum(self._done.values())
