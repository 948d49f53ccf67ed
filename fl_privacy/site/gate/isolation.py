"""Isolation of a process by all available means; it uses the standard library only."""

import errno
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fl_privacy.site.gate import linux_calls as kernel
from fl_privacy.site.gate.warden import Room, watched

SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/sys/devices/system")
"""System folders that programs need."""

_OF_PROGRAMS = ("ld.so.cache", "localtime", "timezone", "mime.types", "os-release", "alternatives", "fonts")
SETTINGS = tuple(f"/etc/{name}" for name in (*_OF_PROGRAMS, "passwd", "group", "nsswitch.conf"))
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Available devices; ``/dev/zero`` is not, since its shared mappings are uncounted memory."""

GRAPHICS = ("/dev/dri", *(f"/dev/nvidia{name}" for name in ("0", "ctl", "-uvm", "-uvm-tools", "-modeset")))
PROCESS = tuple(
    f"/proc/{name}" for name in ("self", "cpuinfo", "meminfo", "stat", "sys/kernel", "sys/vm", "filesystems")
)
"""Readable parts of ``/proc``; other processes' command lines could reveal secrets."""

SHARED_MEMORY, OTHER_TEMPORARY = "/dev/shm", "/tmp"

MOST_FILES = 200_000  # most files and folders in memory
SLACK = 1 << 30  # bytes of address space in addition to the memory, for threads' stacks, which are mostly unused


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Resources that an isolated process may reach."""

    temporary: str  # working folder; the folder ``root`` next to it becomes the process's root
    reads: Sequence[str] = ()  # readable paths in addition to those of the system and Python
    writes: Sequence[str] = ()  # writable paths in addition to these
    layered: Sequence[str] = ()  # readable folders in which changes are possible, but lost at the end of the process
    hidden: Sequence[str] = ()  # folders and files within these paths that appear empty
    most_bytes: int = 8 << 30  # most bytes of memory of the process with its children, and of files that it writes
    most_processes: int = 128
    internet: bool = False  # ``True`` allows internet sockets, which reach nothing outside of the process's own network


@dataclass
class Isolation:
    """Isolation of a process: names of the mechanisms that are in force, and of those that are missing."""

    network: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_enough(self) -> bool:
        return bool(self.network and self.files)

    @property
    def is_all(self) -> bool:
        return OWN_ROOT in self.files and "seccomp" in self.network and bool(self.bounds)

    def in_words(self) -> str:
        means = {
            "the network": self.network,
            "files": self.files,
            "other processes": self.processes,
            "more memory, processes and files than it may have": self.bounds or [ONE_BY_ONE],
        }
        held = [f"{what}: {', '.join(by) or 'OPEN'}" for what, by in means.items()]
        missing = f" Not to be had: {'; '.join(self.missing)}." if self.missing else ""
        return f"The app is kept from {'; '.join(held)}.{missing}"


OWN_ROOT = "a root of its own"
UNSEALED = "sockets in files, since one of the site's could be among those that the app reads or writes"
ONE_BY_ONE = "OPEN but for each process's own memory"


def keep_apart(wishes: Wishes) -> Isolation:
    """Fork twice and isolate the grandchild; return the isolation obtained, in the grandchild only.

    The caller limits memory and processes; its child waits for the grandchild. If one of the three ends, so do the
    others. Without namespaces, or with several threads, nothing is forked. ``wishes``: resources that remain available.
    ``OSError`` if the memory can't be limited.
    """
    held = Isolation()
    if sys.platform != "linux" or threading.active_count() > 1:
        held.missing.append("namespaces, Landlock and seccomp, which are Linux's, of a process with one thread")
        _limit(wishes, held, 0)
        return held
    own_root = _enter_namespaces(held, wishes)
    if not held.bounds:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(wishes.temporary)
    _limit(wishes, held, SLACK if held.bounds else 0)
    try:
        kernel.drop_capabilities()
    except (OSError, KeyError) as error:
        held.missing.append(f"giving up privileges ({error})")
    _landlock(wishes, held, own_root)
    try:
        unix_sockets = own_root and not any(each.startswith(UNSEALED) for each in held.missing)
        kernel.restrict_calls(unix_sockets=unix_sockets, internet=own_root and wishes.internet)
        held.network.append("seccomp")
        held.processes.append("seccomp")
    except OSError as error:
        held.missing.append(f"seccomp ({error})")
    return held


def _enter_namespaces(held: Isolation, wishes: Wishes) -> bool:
    user, group, parent = os.getuid(), os.getgid(), os.getppid()
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
    ready, tell = os.pipe()
    if child := os.fork():
        os.close(tell)
        _close_all(ready)
        if os.read(ready, 1) == b"1":  # the root has changed for this process too
            room = Room(wishes.most_bytes, wishes.most_processes)
            try:
                os._exit(watched(child, parent, room, wishes.temporary))  # count the app's resources until it has ended
            finally:  # whatever went wrong: this process never goes on as its caller
                os._exit(1)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.close(ready)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if own_root := _change_root(wishes, held):
        tasks = Room(wishes.most_bytes, wishes.most_processes).most_tasks
        for place, value in (("sys/kernel/pid_max", tasks), ("self/oom_score_adj", 1000)):
            with suppress(OSError):  # an older kernel has one number for the whole machine
                Path(f"/proc/{place}").write_text(str(value), encoding="ascii")
        kernel.mount("", "/proc", None, _LOCKED | kernel.MS_NOEXEC)
        if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14):  # by user and namespace since
            resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
        held.bounds.append("what all its processes use together is counted from outside")
    os.write(tell, b"1" if own_root else b"0")
    os.close(tell)
    if (app := os.fork()) == 0:
        os.setsid()  # processors are shared by session, so that the counting process keeps its share
        os.nice(5)
        return own_root
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # by default the first process of a namespace ignores it
    _close_all()
    while (ended := os.wait())[0] != app:
        continue
    os._exit(os.waitstatus_to_exitcode(ended[1]) & 0xFF)


def _close_all(*but: int) -> None:
    for number in range(64):
        if number not in (2, *but):
            with suppress(OSError):
                os.close(number)


_LOCKED = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV


def _change_root(wishes: Wishes, held: Isolation) -> bool:
    root = str(Path(wishes.temporary).with_name("root"))
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    try:
        kernel.mount("", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", root, "tmpfs", flags, "size=16m,mode=0755")
        space = Path(root, ".space")
        space.mkdir()
        kernel.mount("tmpfs", str(space), "tmpfs", flags, f"mode=0700,size={wishes.most_bytes},nr_inodes={MOST_FILES}")
        Path(root, "proc").mkdir()
        kernel.mount("proc", f"{root}/proc", "proc", flags | kernel.MS_NOEXEC)
        given = (*readable(wishes), *wishes.reads)
        if not {OTHER_TEMPORARY, "/"}.intersection(given):
            _bind(OTHER_TEMPORARY, root, source=_folder(space / "tmp"))
        bound = _outermost(given)
        for place in bound:
            _bind(place, root, locks=_LOCKED)
        if unsealed := [*_unsealed(bound, root, _folder(space / "sealed")), *wishes.writes]:
            without = "they can be had without mounts in these, and without app.writes"
            held.missing.append(f"{UNSEALED} ({', '.join(unsealed)}; {without})")
        for place in (*DEVICES, *GRAPHICS):  # can still be written to, but modes and times are the machine's
            _bind(place, root, locks=_LOCKED & ~kernel.MS_NODEV)
        for place in wishes.writes:
            _bind(place, root)
        for place in (wishes.temporary, SHARED_MEMORY):
            _bind(place, root, source=_folder(space / Path(place).name))
        for number, place in enumerate(wishes.layered):
            _layer(place, root, space / f"layer{number}", held)
        for place in _seen_at(wishes.hidden, bound):
            if Path(root + place).is_dir():
                kernel.mount("tmpfs", root + place, "tmpfs", flags | kernel.MS_RDONLY, "size=4k,mode=0555")
            elif Path(root + place).exists():
                kernel.mount("/dev/null", root + place, None, kernel.MS_BIND)
        Path(root, "dev/fd").symlink_to("/proc/self/fd")
        kernel.detach(str(space))
        kernel.mount("", root, None, _LOCKED)
        kernel.enter_root(root)
    except (OSError, KeyError) as error:
        held.missing.append(f"{OWN_ROOT} ({error})")
        return False
    held.files.append(OWN_ROOT)
    return True


def _folder(place: Path) -> str:
    place.mkdir(mode=0o700)
    return str(place)


def _unsealed(bound: Iterable[str], root: str, empty: str) -> Iterator[str]:
    """Hide sockets in folders ``bound`` below ``root`` by overlays, which need an ``empty`` one; yield failures."""
    for bare in bound:
        target, real = root + bare, os.path.realpath(bare)
        if not os.path.lexists(target) or os.path.isfile(real) or real.startswith("/sys/"):  # noqa: PTH113
            continue
        options = f"lowerdir={_escaped(real)}:{_escaped(empty)},userxattr"
        try:
            if real == "/" or any(place != target for place in _mounts_within(target)):
                raise OSError(errno.EINVAL, "others are in it")
            kernel.mount("overlay", target, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        except OSError:
            yield bare


def _layer(place: str, root: str, space: Path, held: Isolation) -> None:
    source, above, work = os.path.realpath(place), space / "above", space / "work"
    for folder in (above, work):
        folder.mkdir(mode=0o700, parents=True)
    if not os.path.isdir(source):  # noqa: PTH112
        _bind(place, root, source=str(above))
        return
    Path(root + place).mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={_escaped(source)},upperdir={_escaped(str(above))},workdir={_escaped(str(work))},userxattr"
    try:
        if any(each != source for each in _mounts_within(source)):  # an overlay would not show them
            raise OSError(errno.EINVAL, "others are mounted in it")
        kernel.mount("overlay", root + place, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    except OSError as error:
        held.missing.append(f"writing to {place} ({error})")
        _bind(place, root, locks=_LOCKED)


def _escaped(place: str) -> str:
    return re.sub(r"([\\,:])", r"\\\1", place)


def readable(wishes: Wishes) -> list[str]:
    """Return paths that an isolated app may read: Python, packages and system libraries, not ``wishes.temporary``."""
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, *(entry for entry in sys.path if entry)]
    found = dict.fromkeys(str(Path(each).absolute()) for each in python)
    return [*SYSTEM, *SETTINGS, *(each for each in found if each != wishes.temporary)]


def _outermost(places: Iterable[str]) -> list[str]:
    found: list[str] = []
    both = [each for place in places for each in (os.path.abspath(place), os.path.realpath(place))]  # noqa: PTH100
    for place in sorted(dict.fromkeys(both), key=len):
        if not any(place == other or place.startswith(f"{other.rstrip('/')}/") for other in found):
            found.append(place)
    return found


def _seen_at(places: Iterable[str], bound: Iterable[str]) -> Iterator[str]:
    held = [(place, os.path.realpath(place)) for place in bound]
    for place in places:
        parent, name = os.path.split(place)
        real = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118
        for shown, source in held:
            if real == source or real.startswith(f"{source.rstrip('/')}/"):
                yield shown + real[len(source) :]


def _bind(place: str, root: str, *, source: str = "", locks: int = 0) -> None:
    source, target = source or os.path.realpath(place), root + place
    if not os.path.exists(source) or os.path.ismount(target):  # noqa: PTH110
        return
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(source):  # noqa: PTH112
        Path(target).mkdir(exist_ok=True)
    elif not os.path.exists(target):  # noqa: PTH110
        Path(target).touch()
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    real = os.path.realpath(target)
    for held, flags in ({real: 0} | _mounts_within(real)).items() if locks else ():
        try:
            kernel.mount("", held, None, locks | flags)
        except OSError as error:  # hidden under another mount, or in a folder of another user
            if held == real or error.errno not in {errno.ENOENT, errno.EINVAL, errno.EACCES}:
                raise


def _mounts_within(target: str) -> dict[str, int]:
    flags = {b"nosuid": kernel.MS_NOSUID, b"nodev": kernel.MS_NODEV, b"noexec": kernel.MS_NOEXEC}
    found = {}
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        words = line.split()
        place = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), words[4]))
        if place == target or place.startswith(f"{target}/"):
            found[place] = sum(flags.get(option, 0) for option in words[5].split(b","))
    return found


def _landlock(wishes: Wishes, held: Isolation, own_root: bool) -> None:
    abi = kernel.landlock_abi()
    if not abi:
        held.missing.append("Landlock, which the kernel does not have")
        return
    reads = [*readable(wishes), *wishes.reads, *(("/proc",) if own_root else PROCESS)]
    own = (OTHER_TEMPORARY, wishes.temporary, SHARED_MEMORY, *wishes.layered) if own_root else (wishes.temporary,)
    try:
        kernel.restrict_files(reads, [*DEVICES, *GRAPHICS, *wishes.writes, *own], abi)
    except OSError as error:
        held.missing.append(f"Landlock ({error})")
        return
    held.files.append(f"Landlock {abi}")
    held.processes.append(f"Landlock {abi}")


def _limit(wishes: Wishes, held: Isolation, slack: int) -> None:
    dumped = int(resource.getrlimit(resource.RLIMIT_CORE)[1] != 0)  # at 1, not even a program of core_pattern gets it
    if not dumped:
        held.missing.append("a limit of 1 on core dumps, which also binds programs that take them; raise ulimit -Hc")
    resource.setrlimit(resource.RLIMIT_CORE, (dumped, dumped))
    resource.setrlimit(resource.RLIMIT_FSIZE, (wishes.most_bytes, wishes.most_bytes))
    resource.setrlimit(resource.RLIMIT_DATA, (wishes.most_bytes + slack, wishes.most_bytes + slack))
