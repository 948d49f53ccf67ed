"""Keep a process apart: no network, no files but those it is given, a temporary folder, limits of memory.

Each means is tried; what holds is said. Standard library alone, before anything else is imported.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_privacy.gate import kernel

SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/sys/devices/system")
"""Places of the system that any program reads."""

SETTINGS = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/timezone",
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/alternatives",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
GRAPHICS = ("/dev/dri", *(f"/dev/nvidia{name}" for name in ("0", "ctl", "-uvm", "-uvm-tools", "-modeset")))
PROCESS = tuple(
    f"/proc/{name}" for name in ("self", "cpuinfo", "meminfo", "stat", "sys/kernel", "sys/vm", "filesystems")
)
"""Of ``/proc`` where it is the machine's own; other processes' command lines tell addresses."""

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a process may still reach in isolation.

    Attributes:
        temporary: a folder of its own, that it works in; its neighbor ``root`` becomes its root.
        reads, writes: places beside the system's and Python's.
        most_bytes: of memory that it writes to; ``None`` does not limit it.
    """

    temporary: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    most_bytes: int | None = None

    def as_plain(self) -> dict[str, Any]:
        """Return the wishes as plain values for another process."""
        return asdict(self)


@dataclass
class Held:
    """What keeps a process apart, and what could not be had, in words."""

    network: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_enough(self) -> bool:
        """Say whether neither the network nor files of others can be reached."""
        return bool(self.network and self.files)

    def in_words(self) -> str:
        """Describe the isolation for a log."""
        held = [f"{what}: {', '.join(by) or 'OPEN'}" for what, by in self._held()]
        missing = f" Not to be had: {'; '.join(self.missing)}." if self.missing else ""
        return f"The app is kept from {'; '.join(held)}.{missing}"

    def _held(self) -> list[tuple[str, list[str]]]:
        return [("the network", self.network), ("files", self.files), ("other processes", self.processes)]


def keep_apart(wishes: Wishes) -> Held:
    """Keep this process, which has one thread, apart; returns in a child of it, whose end ends this process.

    Raises:
        OSError: limits of memory can't be set.
    """
    held = Held()
    if sys.platform != "linux" or threading.active_count() > 1:
        held.missing.append("namespaces, Landlock and seccomp, which are Linux's, of a process with one thread")
        _limit(wishes)
        return held
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    own_root = _enter_namespaces(held) and _change_root(wishes, held)
    os.chdir(wishes.temporary)
    _limit(wishes)
    try:
        kernel.drop_capabilities()
    except (OSError, KeyError) as error:
        held.missing.append(f"giving up privileges ({error})")
    _landlock(wishes, held, own_root)
    try:
        kernel.restrict_calls(unix_sockets=own_root)
        held.network.append("seccomp")
        held.processes.append("seccomp")
    except OSError as error:
        held.missing.append(f"seccomp ({error})")
    return held


def _enter_namespaces(held: Held) -> bool:
    """Make mounts, processes and network this process's own; return whether they are."""
    user, group = os.getuid(), os.getgid()
    wanted = kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
    try:
        kernel.unshare(wanted | kernel.NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    except OSError as error:
        try:
            kernel.unshare(wanted)
        except OSError:
            held.missing.append(f"namespaces ({error})")
            return False
    held.network.append("a network namespace")
    held.processes.append("a process namespace")
    _go_on_in_child()
    return True


def _go_on_in_child() -> None:
    """Fork; the parent ends as the child, the first process of the new namespace, does."""
    if child := os.fork():
        for number in range(3, 64):
            try:
                os.close(number)
            except OSError:
                continue
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _change_root(wishes: Wishes, held: Held) -> bool:
    """Make a root that holds what may be read and written and nothing else; return whether it could be made."""
    root = str(Path(wishes.temporary).with_name("root"))
    try:
        kernel.mount("", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=16m,mode=0755")
        Path(root, "proc").mkdir()
        kernel.mount("proc", f"{root}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        for place in _outermost((*readable(wishes), *wishes.reads)):
            _bind(place, root, read_only=True)
        for place in (*DEVICES, *GRAPHICS, *wishes.writes, wishes.temporary):
            _bind(place, root, read_only=False)
        Path(root, "dev/shm").mkdir()
        size = "" if wishes.most_bytes is None else f",size={wishes.most_bytes}"
        kernel.mount("tmpfs", f"{root}/dev/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"mode=1777{size}")
        Path(root, "dev/fd").symlink_to("/proc/self/fd")
        Path(root, "tmp").mkdir(exist_ok=True)
        kernel.enter_root(root)
    except (OSError, KeyError) as error:
        held.missing.append(f"a root of its own ({error})")
        return False
    held.files.append("a root of its own")
    return True


def readable(wishes: Wishes) -> list[str]:
    """List Python, what is installed for it, and the system's libraries."""
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, *(entry for entry in sys.path if entry)]
    found = dict.fromkeys(str(Path(each).absolute()) for each in python)
    return [*SYSTEM, *SETTINGS, *(each for each in found if each != wishes.temporary)]


def _outermost(places: Iterable[str]) -> list[str]:
    """Return those of ``places``, and what they link to, that lie in no other one."""
    found: list[str] = []
    both = [each for place in places for each in (os.path.abspath(place), os.path.realpath(place))]  # noqa: PTH100
    for place in sorted(dict.fromkeys(both), key=len):
        if not any(place == other or place.startswith(f"{other.rstrip('/')}/") for other in found):
            found.append(place)
    return found


def _bind(place: str, root: str, *, read_only: bool) -> None:
    """Bind ``place`` inside ``root``, if there is such a place."""
    source, target = os.path.realpath(place), root + place
    if not os.path.exists(source) or os.path.ismount(target):  # noqa: PTH110
        return
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(source):  # noqa: PTH112
        Path(target).mkdir(exist_ok=True)
    elif not os.path.exists(target):  # noqa: PTH110
        Path(target).touch()
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    if read_only:
        status = os.statvfs(target).f_flag
        kept = {os.ST_NOSUID: kernel.MS_NOSUID, os.ST_NODEV: kernel.MS_NODEV, os.ST_NOEXEC: kernel.MS_NOEXEC}
        flags = sum(flag for bit, flag in kept.items() if status & bit) | (status & 0x1C00)  # times of access
        kernel.mount("", target, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)


def confine_writes(places: Iterable[str]) -> str:
    """Let this process, and those it will start, read everything and write nothing but ``places`` and devices.

    Where Landlock knows of it, no TCP connection is made and no process outside is signalled either. To be called
    before there are threads.

    Returns:
        What holds the process, such as "Landlock 7"; empty where the kernel has nothing that does.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return ""
    try:
        abi = kernel.landlock_abi()
        if not abi:
            return ""
        kernel.restrict_files(
            ["/"], [*DEVICES, *map(str, Path("/dev").glob("nvidia*")), *GRAPHICS, SHARED_MEMORY, *places], abi
        )
    except (OSError, KeyError):  # not allowed, or another kind of machine
        return ""
    return f"Landlock {abi}"


def _landlock(wishes: Wishes, held: Held, own_root: bool) -> None:
    abi = kernel.landlock_abi()
    if not abi:
        held.missing.append("Landlock, which the kernel does not have")
        return
    reads = [*readable(wishes), *wishes.reads, *(("/proc",) if own_root else PROCESS)]
    writes = [*DEVICES, *GRAPHICS, *wishes.writes, wishes.temporary, *((SHARED_MEMORY,) if own_root else ())]
    try:
        kernel.restrict_files(reads, writes, abi)
    except OSError as error:
        held.missing.append(f"Landlock ({error})")
        return
    held.files.append(f"Landlock {abi}")
    held.processes.append(f"Landlock {abi}")


def _limit(wishes: Wishes) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if wishes.most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (wishes.most_bytes, wishes.most_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (wishes.most_bytes, wishes.most_bytes))
