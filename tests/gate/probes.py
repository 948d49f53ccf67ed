"""What code in a sandbox may try, one function for each way out: it returns what it reached, or nothing.

Run as a module it is a process that is kept apart as an app's is, and loads nothing but the standard library.
"""

# ruff: noqa: PTH101, PTH115, PTH123, PTH208, PTH211

import contextlib
import ctypes
import fcntl
import itertools
import json
import mmap
import os
import resource
import signal
import socket
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fl_privacy.site.gate.framing import Said, own_pipes, read_parts, write_parts
from fl_privacy.site.gate.isolation import Isolation, Wishes, keep_apart

Places = Mapping[str, Any]
"""Of the world outside: files, sockets, folders, the process that started this one."""

Probe = Callable[[Places], object]
PROBES: dict[str, Probe] = {}
"""Probes that end, by name."""

ENDLESS: dict[str, Probe] = {}
"""Probes that take more than there is; who is not ended by it, or refused, has got through."""

UNBOUND = "PROBES_UNBOUND"
"""Environment variable with which the process is kept from nothing, to see that probes find what is there."""

MIB = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


def probe(one: Probe) -> Probe:
    PROBES[one.__name__] = one
    return one


def endless(one: Probe) -> Probe:
    ENDLESS[one.__name__] = one
    return one


def reached(**tries: Callable[[], object]) -> str:
    """Name what did not fail."""
    found = []
    for name, attempt in tries.items():
        try:
            said = attempt()
        except (OSError, ValueError, termios.error):
            continue
        if said is not False:
            found.append(name)
    return ", ".join(found)


def _call(number: int, *arguments: Any) -> None:
    if LIBC.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


@probe
def terminal_is_typed_into(places: Places) -> object:
    return reached(**{f"fd {n}": lambda n=n: fcntl.ioctl(n, termios.TIOCSTI, b"x") for n in range(10)})


@probe
def terminal_is_opened(places: Places) -> object:
    names = ("/dev/tty", "/dev/ptmx", "/dev/tty1", "/dev/console")
    return reached(**{name: lambda name=name: os.open(name, os.O_RDWR) for name in names})


@probe
def terminal_is_there(places: Places) -> object:
    return reached(**{f"fd {n}": lambda n=n: os.isatty(n) for n in range(64)})


@probe
def descriptors_are_inherited(places: Places) -> object:
    def other(number: int) -> bool:
        name = os.readlink(f"/proc/self/fd/{number}")
        return name.startswith(("/", "socket:")) and name not in {"/dev/null", "/dev/urandom", "/dev/random"}

    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return reached(**{f"fd {n}": lambda n=n: other(n) for n in numbers})


def _connected(family: int, kind: int, where: Any) -> None:
    with socket.socket(family, kind) as wire:
        wire.settimeout(1)
        wire.connect(where)
        wire.sendall(b"the key")


def _sent_by_a_pair(kind: int, where: str) -> None:
    for wire in socket.socketpair(socket.AF_UNIX, kind):
        with wire:
            wire.sendto(b"the key", where)


@probe
def socket_in_a_file(places: Places) -> object:
    return reached(outside=lambda: _connected(socket.AF_UNIX, socket.SOCK_STREAM, places["socket"]))


@probe
def socket_in_the_apps_folder(places: Places) -> object:
    return reached(inside=lambda: _connected(socket.AF_UNIX, socket.SOCK_STREAM, places["app_socket"]))


@probe
def socket_without_a_file(places: Places) -> object:
    return reached(abstract=lambda: _connected(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + places["abstract"]))


@probe
def socket_of_the_internet(places: Places) -> object:
    return reached(
        tcp=lambda: _connected(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", places["port"])),
        udp=lambda: _connected(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", places["port"])),
        tcp6=lambda: _connected(socket.AF_INET6, socket.SOCK_STREAM, ("::1", places["port"])),
    )


@probe
def socket_of_another_family(places: Places) -> object:
    own = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    return reached(
        **{
            f"family {family}, {kind}": lambda f=family, k=kind: socket.socket(f, k).close()
            for family in range(1, 46)
            for kind in (1, 2, 3, 5)
            if family not in own
        },
        raw=lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
    )


@probe
def files_of_the_user(places: Places) -> object:
    secret = Path(places["secret"])
    return reached(
        read=secret.read_bytes,
        listed=lambda: os.listdir(secret.parent),
        written=lambda: secret.write_text("mine"),
        new=lambda: (secret.parent / "new").write_text("mine"),
        above=lambda: Path("/proc/self/cwd/../../../../..", str(secret).lstrip("/")).read_bytes(),
        by_init=lambda: Path("/proc/1/root", str(secret).lstrip("/")).read_bytes(),
        by_init_folder=lambda: Path("/proc/1/cwd", str(secret).lstrip("/")).read_bytes(),
        shadow=lambda: Path("/etc/shadow").read_bytes(),
    )


@probe
def files_of_the_app_are_changed(places: Places) -> object:
    own = Path(places["app"], "own.txt")
    return reached(
        written=lambda: own.write_text("other"),
        new=lambda: (own.parent / "new").write_text("x"),
        removed=own.unlink,
        renamed=lambda: own.rename(own.with_name("other")),
        linked=lambda: os.link(own, own.with_name("linked")),
        truncated=lambda: os.truncate(own, 0),
    )


@probe
def attributes_are_changed(places: Places) -> object:
    own = str(Path(places["app"], "own.txt"))
    return reached(
        mode=lambda: os.chmod(own, 0o777),
        times=lambda: os.utime(own, (0, 0)),
        owner=lambda: os.chown(own, os.getuid(), os.getgid()),
        attribute=lambda: os.setxattr(own, "user.seen", b"1"),
        folder=lambda: os.chmod(places["app"], 0o777),
    )


@probe
def files_are_linked_out(places: Places) -> object:
    os.symlink(places["secret"], "link")
    return reached(
        symbolic=lambda: Path("link").read_bytes(),
        hard=lambda: os.link(Path(places["app"], "own.txt"), "hard"),
        handle=lambda: _call(303, -100, places["secret"].encode(), bytes(136), ctypes.byref(ctypes.c_int()), 0),
    )


@probe
def python_is_changed(places: Places) -> object:
    here = Path(os.__file__)
    site = next((Path(entry) for entry in sys.path if entry.endswith("site-packages")), here.parent)
    return reached(
        library=lambda: here.open("ab").close(),
        new=lambda: (here.parent / "sitecustomize.py").write_text("x"),
        installed=lambda: (site / "startup.pth").write_text("import os"),
        package=lambda: Path(places["package"], "new.py").write_text("x"),
    )


@probe
def pages_of_other_audits(places: Places) -> object:
    page = Path(places["page"])
    return reached(
        read=page.read_bytes,
        written=lambda: page.write_text("nothing was read"),
        new=(page.parent.parent / "audit-other").mkdir,
        moved=lambda: page.parent.rename(page.parent.with_name("gone")),
    )


@probe
def root_is_written(places: Places) -> object:
    folders = ("/", "/etc", "/usr", "/run", "/dev", "/proc")
    return reached(**{name: lambda n=name: Path(n, "new").write_text("x") for name in folders})


@probe
def shared_memory_is_seen_outside(places: Places) -> object:
    for folder in ("/dev/shm", "/tmp"):
        Path(folder, places["name"]).write_text("seen")
    return ""


@probe
def pipe_in_the_apps_folder(places: Places) -> object:
    def opened() -> bool:
        descriptor = os.open(places["fifo"], os.O_RDWR | os.O_NONBLOCK)
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)

    return reached(pipe=opened)


@probe
def devices_are_made(places: Places) -> object:
    def made(kind: int, major: int, minor: int) -> None:
        name = f"device{major}-{minor}"
        os.mknod(name, 0o600 | kind, os.makedev(major, minor))
        os.open(name, os.O_RDONLY)

    kinds = ((stat.S_IFBLK, 254, 0), (stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 5, 0))
    return reached(**{f"{major}:{minor}": lambda d=(kind, major, minor): made(*d) for kind, major, minor in kinds})


@probe
def mounts_and_namespaces(places: Places) -> object:
    new_user, new_mounts = 0x10000000, 0x20000
    return reached(
        unshare=lambda: _call(272, new_user),
        clone=lambda: _call(56, new_user | new_mounts | 17, 0, 0, 0, 0),
        mount=lambda: _call(165, b"none", b".", b"tmpfs", 0, 0),
        unmount=lambda: _call(166, b"/proc", 2),
        remount=lambda: _call(165, b"", b"/", 0, 32 | 4096, 0),
        chroot=lambda: os.chroot("."),
        setns=lambda: _call(308, os.open("/proc/self/ns/net", os.O_RDONLY), 0),
        tree=lambda: _call(428, -100, b"/", 1),
    )


@probe
def kernel_is_set(places: Places) -> object:
    names = ("kernel/core_pattern", "kernel/hostname", "kernel/pid_max", "vm/drop_caches", "kernel/sysrq")
    return reached(
        **{name: lambda n=name: Path("/proc/sys", n).open("w").close() for name in names},
        killed_last=lambda: Path("/proc/self/oom_score_adj").write_text("-1000"),
        clock=lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()),
        name=lambda: socket.sethostname("mine"),
        keys=lambda: _call(248, b"user", b"a", b"b", 1, ctypes.c_long(-3)),
        log=lambda: _call(103, 3, bytes(100), 100),
        limits=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20)),
    )


@probe
def processes_outside(places: Places) -> object:
    def ended() -> bool:
        os.kill(1, signal.SIGKILL)
        os.kill(1, signal.SIGSTOP)
        return Path("/proc/1/stat").read_text().split()[2] in "TZX"

    tries: dict[str, Callable[[], object]] = {
        "listed": lambda: len([name for name in os.listdir("/proc") if name.isdigit()]) > 20,
        "signalled": lambda: os.kill(places["process"], 0),
        "state": lambda: Path("/proc/1/environ").read_bytes(),
        "memory": lambda: Path("/proc/1/mem").open("r+b").close(),
        "traced": lambda: _call(101, 16, 1, 0, 0),
        "read": lambda: _call(310, 1, bytes(16), 1, bytes(16), 1, 0),
    }
    return reached(**tries) if UNBOUND in os.environ else reached(**tries, ended=ended)


@probe
def memory_is_dumped(places: Places) -> object:
    """Lower the limit to 0, which bounds files, but not a program of ``core_pattern``; 1 bounds both (core(5))."""
    core, dumped = resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)
    new = (ctypes.c_ulong * 2)(0, 0)
    return reached(
        limit=lambda: dumped != (places["core"],) * 2,
        set=lambda: resource.setrlimit(core, (0, 0)),
        another=lambda: resource.prlimit(0, core, (0, 0)),
        old_call=lambda: _call(160, core, new),
        high_bits=lambda: _call(302, 0, ctypes.c_ulong(1 << 32 | core), new, 0),
    )


@probe
def devices_are_in_folders(places: Places) -> object:
    """Look for mounts that let a device, or a program of another user's, work."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    free = [words[4] for words in lines if not {"nodev", "nosuid"} <= {*words[5].split(",")} and words[3] != "/null"]
    return ", ".join(place for place in free if not place.startswith("/dev/"))


@probe
def environment_is_the_users(places: Places) -> object:
    return ", ".join(name for name in os.environ if name in places["variables"])


@probe
def memory_that_is_counted_nowhere(places: Places) -> object:
    def shared(size: int = 64 * MIB) -> None:
        mmap.mmap(-1, size).close()

    def zero() -> None:
        with open("/dev/zero", "r+b") as file:
            mmap.mmap(file.fileno(), 64 * MIB)

    return reached(
        shared=shared,
        zero=zero,
        memfd=lambda: os.memfd_create("a"),
        secret=lambda: _call(447, 0),
        system_v=lambda: _call(29, 0, 64 * MIB, 0o1600),
        messages=lambda: _call(68, 0, 0o1600),
        semaphores=lambda: _call(64, 0, 1000, 0o1600),
        queue=lambda: _call(240, b"a", os.O_CREAT | os.O_RDWR, 0o600, 0),
        ring=lambda: _call(425, 8, bytes(120)),
        bpf=lambda: _call(321, 0, bytes(120), 120),
        faults=lambda: _call(323, 0),
    )


@probe
def daemon_stays(places: Places) -> object:
    """Leave processes that no parent, session, signal or death of a parent ends; the test looks for them outside."""
    LIBC.prctl(1, 0)
    if os.fork() == 0:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            Path(f"/proc/self/task/{os.getpid()}").exists()
            LIBC.prctl(15, places["name"].encode()[:15])
            for number in range(256):
                with contextlib.suppress(OSError):
                    os.close(number)
            time.sleep(600)
        os._exit(0)
    return ""


@probe
def folders_are_deep(places: Places) -> object:
    here = os.open(".", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.fchmod(here, 0)
    return ""


@endless
def own_memory(places: Places) -> object:
    held = bytearray()
    while len(held) < 3000 * MIB:
        held += b"x" * (16 * MIB)
    return "3,000 MiB"


@endless
def memory_of_children(places: Places) -> object:
    children = 6
    full, tell = os.pipe()
    for _ in range(children):
        if os.fork() == 0:
            held = b"x" * (places["most"] // 2)
            os.write(tell, held[:1])
            time.sleep(600)
    for _ in range(children):
        os.read(full, 1)
    time.sleep(1)
    return "six halves"


@endless
def files_without_a_disk(places: Places) -> object:
    left = 3000 * MIB
    for folder in (".", "/dev/shm", "/tmp"):
        with contextlib.suppress(OSError), open(f"{folder}/big", "wb", buffering=0) as file:
            while left > 0:
                left -= file.write(b"x" * (16 * MIB))
    return "" if left > 0 else "3,000 MiB"


@endless
def files_by_number(places: Places) -> object:
    made = 0
    with contextlib.suppress(OSError):
        for made in range(400_000):
            os.close(os.open(f"f{made}", os.O_CREAT))
    return "" if made < 300_000 else f"{made} files"


@endless
def file_and_memory(places: Places) -> object:
    with open("big", "wb", buffering=0) as file:
        for _ in range(places["most"] // MIB // 2 + 64):
            file.write(b"x" * MIB)
        held = b"x" * (places["most"] // 2)
        time.sleep(5)
    return f"{len(held)} beside a file"


@endless
def buffers_of_sockets(places: Places) -> object:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held = []
    for _ in range(places["most"] // MIB):
        pair = socket.socketpair()
        held.append(pair)
        for one in pair:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    one.send(b"x" * 65536)
    time.sleep(5)
    return f"{len(held)} pairs"


@endless
def buffers_of_pipes(places: Places) -> object:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held = []
    with contextlib.suppress(OSError):
        while len(held) < 40_000:
            ends = os.pipe()
            os.set_blocking(ends[1], False)
            held.append(ends)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(ends[1], b"x" * 65536)
    time.sleep(5)
    return "" if len(held) < 1000 else f"{len(held)} pipes"


@endless
def processes_without_end(places: Places) -> object:
    for _ in range(1500):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(5)
    return "1,500 processes"


@endless
def fork_bomb(places: Places) -> object:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                with contextlib.suppress(OSError):
                    os.setsid()
    return "ten seconds of it"


@endless
def threads_without_end(places: Places) -> object:
    made = 0
    threading.stack_size(64 << 10)
    with contextlib.suppress(RuntimeError):
        while made < 20_000:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            made += 1
    return "" if made < 10_000 else f"{made} threads"


def folders_are_listed(places: Any) -> object:
    return "".join(name for place in places for name in (os.listdir(place) if Path(place).exists() else ()))


def files_are_read(places: Places) -> object:
    return "".join(Path(place).read_text() for place in places["places"])


def sockets_are_called(places: Places) -> object:
    calls = {p: lambda p=p: _connected(socket.AF_UNIX, socket.SOCK_STREAM, p) for p in places["places"]}
    pairs = list(itertools.product((socket.SOCK_DGRAM, socket.SOCK_RAW), places["places"]))  # connected, yet sendto
    return reached(**calls, **{f"pair {pair}": lambda pair=pair: _sent_by_a_pair(*pair) for pair in pairs})


def sockets_are_made(places: Places) -> object:
    def made() -> None:
        with socket.socket(socket.AF_UNIX) as own:
            own.bind("own")
            own.listen()
            _connected(socket.AF_UNIX, socket.SOCK_STREAM, "own")

    return reached(made=made)


def say_nothing(say: Callable[..., None]) -> None:
    say(Said.NAME, b"app")
    os._exit(0)


def say_too_much(say: Callable[..., None]) -> None:
    say(Said.NAME, b"app")
    say(Said.PAGE, b"x" * (80 << 20))


def say_no_page(say: Callable[..., None]) -> None:
    say(Said.NAME, b"app")
    say(Said.DONE, b'{"page": "/etc/passwd", "ran": {}}')


def say_another_place(say: Callable[..., None]) -> None:
    say(Said.NAME, b"../../other/../app")
    say(Said.NAME, b"other")
    say(Said.DONE, b"{}")


def say_it_goes_on(say: Callable[..., None]) -> None:
    say(Said.NAME, b"app")
    while True:
        say(Said.TEXT, b"\x1b[2Jtraining\x07")
        time.sleep(0.01)


def print_without_end(say: Callable[..., None]) -> None:
    for _ in range(300):
        os.write(1, (b"\x1b[2J\x1b]0;title\x07" * 8 + b"\n") * 1000)
    os._exit(0)


_LIES = (say_nothing, say_too_much, say_no_page, say_another_place, say_it_goes_on, print_without_end)
HELPERS = {one.__name__: one for one in (folders_are_listed, files_are_read, sockets_are_called, sockets_are_made)}

LIES = {one.__name__: one for one in _LIES}
"""What a process may say to the command outside, by name."""


def main(inlet: int, outlet: int) -> None:
    """Keep apart, and try what is asked for until the other end is closed."""
    (told,) = read_parts(inlet)
    asked = json.loads(told)
    held = Isolation() if UNBOUND in os.environ else keep_apart(Wishes(**asked["wishes"]))
    write_parts(outlet, [json.dumps(asdict(held)).encode()])
    if "asked" in asked:
        LIES[asked["asked"]["lie"]](lambda kind, content: write_parts(outlet, [kind, content]))
    while True:
        name, places = read_parts(inlet)
        found = {**PROBES, **ENDLESS, **HELPERS}[name.decode()](json.loads(places))
        write_parts(outlet, [str(found or "").encode()])


if __name__ == "__main__":
    main(*own_pipes())
