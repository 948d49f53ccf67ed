"""Limits on an app's memory and processes, counted by another process; it uses the standard library only."""

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY, PROCESSES = 81, 82  # exit statuses of an app that was ended for exceeding a limit
ENDED = {MEMORY: "memory_mib", PROCESSES: "processes"}  # exit status -> name of the exceeded limit
OTHER_STATUS = 1  # exit status that replaces an app's own status in ``ENDED``
PAUSE = 0.05  # seconds between two counts
MOST_FAILED = 3  # most consecutive failed counts, after which the app is ended

THREADS, CORE_THREADS, MORE_THREADS = 4, 8, 256
"""Allowed threads for each allowed process, for each processor of the machine, and in addition."""

DESCRIPTOR, SOCKET, THREAD = 8 << 10, 1 << 20, 32 << 10
"""Most bytes of kernel memory of a pipe, a socket and a thread, which no process's memory includes."""

_KIB = 1 << 10
_INIT = 1


@dataclass(frozen=True)
class Room:
    """Limits on all processes of an app together; memory in bytes, including in-memory files."""

    most_bytes: int
    most_processes: int

    @property
    def most_tasks(self) -> int:
        return self.most_processes * THREADS + (os.cpu_count() or 1) * CORE_THREADS + MORE_THREADS


def watched(child: int, parent: int, room: Room, scratch: str) -> int:
    """Wait for the process ``child`` while enforcing the limits ``room``, and return its exit status.

    If ``child``, the first process of its namespace, ends, so do all others in the namespace. If ``parent`` ends, all
    end. Files in the file system of ``scratch`` count as memory.
    """
    failed = 0
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return OTHER_STATUS if code in ENDED else code & 0xFF
        try:
            beyond, failed = _beyond(room, scratch), 0
        except OSError:  # the process table may be gone before the process is
            beyond, failed = 0, failed + 1
        if beyond or failed > MOST_FAILED or os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return beyond or OTHER_STATUS
        time.sleep(PAUSE)


def _beyond(room: Room, scratch: str) -> int:
    numbers = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != _INIT]  # noqa: PTH208
    if len(numbers) > room.most_processes:  # checked before each is counted, which takes long for many
        return PROCESSES
    processes = list[tuple[str, Mapping[str, int]]]()
    for number in numbers:
        with suppress(OSError):
            processes.append((number, figures(Path(f"/proc/{number}/status").read_bytes())))
    threads = sum(status.get("Threads", 1) for _, status in processes)
    if threads > room.most_tasks:
        return PROCESSES
    files = os.statvfs(scratch)
    rest = (files.f_blocks - files.f_bfree) * files.f_frsize + (files.f_files - files.f_ffree) * _KIB
    sockets = Path(f"/proc/{_INIT}/net/sockstat").read_bytes().split()  # of the app's network, which is its own
    rest += int(sockets[2]) * SOCKET + threads * THREAD
    for _, status in processes:
        rest += status.get("VmPTE", 0) * _KIB + status.get("FDSize", 0) * DESCRIPTOR
    own = sum(_own(status) for _, status in processes)
    if rest + own <= room.most_bytes:
        return 0
    exact = sum(_share(number, _own(status)) for number, status in processes)  # forks share much of their own memory
    return MEMORY if rest + exact > room.most_bytes else 0


def figures(text: bytes) -> dict[str, int]:
    """Return the numbers in the ``text`` of a file of ``/proc``, by name."""
    return {name.decode(): int(value) for name, value in re.findall(rb"^(\w+):[ \t]*(\d+)", text, re.MULTILINE)}


def _own(status: Mapping[str, int]) -> int:
    return (status.get("RssAnon", 0) + status.get("VmSwap", 0) + status.get("HugetlbPages", 0)) * _KIB


def _share(number: str, otherwise: int) -> int:
    try:
        sizes = figures(Path(f"/proc/{number}/smaps_rollup").read_bytes())
        huge = sizes.get("Private_Hugetlb", 0) + sizes.get("Shared_Hugetlb", 0)
        return (sizes["Pss_Anon"] + sizes.get("SwapPss", 0) + huge) * _KIB
    except ProcessLookupError:
        return 0
    except (OSError, KeyError):
        return otherwise
