"""Linux system calls by which a process gives up rights; constants are those of the kernel's headers."""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

# from linux/landlock.h, seccomp.h and filter.h, and asm/unistd.h of x86-64 and arm64
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 24, 38, 22
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
CAPSET = {"x86_64": 126, "aarch64": 91}
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

FILE_RIGHTS = 1 | 2 | 4 | 1 << 14 | 1 << 15
"""Landlock's rights on a file: execute, write, read, truncate and device control."""

READ = 1 | 4 | 8  # landlock's rights to execute, to read a file and to read a folder

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_CALLS: dict[str, dict[str, list[int]]] = json.loads(Path(__file__).with_name("calls.json").read_text("utf-8"))
DENIED, _LIMITED = _CALLS["denied"], _CALLS["limited"]
"""Calls that are refused, and calls that are refused with some arguments: name -> numbers on x86-64 and arm64. They
inspect other processes, change the isolation, or hold uncounted memory."""

_CLONE3 = 435  # its flags are in memory: libraries without it fall back to clone
_SHARED_NOWHERE = 0x21  # flags of ``mmap`` for shared memory without a file

_AF_UNIX, _AF_INET, _AF_INET6, _SOCK_STREAM = 1, 2, 10, 1

_LIBC = ctypes.CDLL(None, use_errno=True)
_MACHINE = platform.machine()


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def prctl(option: int, *arguments: int) -> None:
    """Call ``prctl(2)``; ``OSError`` if it fails."""
    given = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_LIBC.prctl(option, *given), "prctl")


def hide_memory() -> None:
    """Protect this process's memory from other processes and core dumps, on Linux only."""
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)


def unshare(flags: int) -> None:
    """Call ``unshare(2)``; ``OSError`` if it fails."""
    _checked(_LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call ``mount(2)``; ``OSError`` if it fails."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(_LIBC.mount(*texts, ctypes.c_ulong(flags), os.fsencode(options) or None), f"mount {target}")


def enter_root(folder: str) -> None:
    """Make the mount ``folder`` the root, and detach the old root; ``OSError`` if it fails."""
    os.chdir(folder)
    _checked(_LIBC.syscall(PIVOT_ROOT[_MACHINE], b".", b"."), "pivot_root")
    detach(".")
    os.chdir("/")


def detach(place: str) -> None:
    """Detach the mount at ``place``; ``OSError`` if it fails."""
    _checked(_LIBC.umount2(os.fsencode(place), MNT_DETACH), f"umount {place}")


def drop_capabilities() -> None:
    """Give up all capabilities of this process and of programs that it starts; ``OSError`` if it fails."""
    for capability in range(64):
        with suppress(OSError):  # no such capability, or no right to drop one
            prctl(PR_CAPBSET_DROP, capability)
    header = struct.pack("Ii", 0x20080522, 0)
    _checked(_LIBC.syscall(CAPSET[_MACHINE], header, bytes(24)), "capset")


def landlock_abi() -> int:
    """Return the kernel's Landlock version; 0 without Landlock."""
    found: int = _LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    return max(found, 0)


def restrict_files(reads: Iterable[str], writes: Iterable[str], abi: int) -> None:
    """Allow only files below ``reads`` and ``writes``; deny TCP and signals as far as Landlock can.

    ``abi``: the kernel's Landlock version, see :func:`landlock_abi`. ``OSError`` if it fails.
    """
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = _checked(_LIBC.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0), "landlock_create_ruleset")
    try:
        for rights, places in ((READ, reads), (handled, writes)):
            for place in places:
                try:
                    descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
                except OSError:  # a missing place needs no rule
                    continue
                try:
                    allowed = rights & handled if Path(place).is_dir() else rights & handled & FILE_RIGHTS
                    rule = struct.pack("=Qi", allowed, descriptor)
                    _checked(_LIBC.syscall(LANDLOCK_ADD, rules, 1, rule, 0), "landlock_add_rule")
                finally:
                    os.close(descriptor)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        _checked(_LIBC.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def restrict_calls(*, unix_sockets: bool, internet: bool = False) -> None:
    """Refuse calls in ``DENIED``, shared memory, and sockets not allowed here, by seccomp; ``OSError`` if it fails."""
    if _MACHINE not in _AUDIT:
        raise OSError(f"{' or '.join(_AUDIT)} is expected, but this machine is {_MACHINE}; use one of these")
    lines = _filter(unix_sockets=unix_sockets, internet=internet)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _filter(*, unix_sockets: bool, internet: bool) -> list[tuple[int, int, int, int]]:
    place = list(_AUDIT).index(_MACHINE)
    families = [_AF_UNIX] * unix_sockets + [_AF_INET, _AF_INET6] * internet
    refused, allowed = (0x06, 0x50001, "", ""), (0x06, 0x7FFF0000, "", "")  # by EPERM
    blocks: dict[str, list[tuple[int, int, str, str]]] = {  # jumps go forward alone
        "start": [
            (0x20, 4, "", ""),  # load the architecture
            (0x15, _AUDIT[_MACHINE], "", "refuse"),
            (0x20, 0, "", ""),  # load the number
            (0x35, _X32, "refuse", ""),
            (0x15, _CLONE3, "none", ""),
            *((0x15, numbers[place], "refuse", "") for numbers in DENIED.values()),
            *((0x15, numbers[place], name, "") for name, numbers in _LIMITED.items()),
            allowed,
        ],
        "clone": [(0x20, 16, "", ""), (0x45, NEWUSER, "refuse", "allow")],
        "mmap": [(0x20, 40, "", ""), (0x54, _SHARED_NOWHERE, "", ""), (0x15, _SHARED_NOWHERE, "refuse", "allow")],
        "socket": [(0x20, 16, "", ""), *((0x15, family, "allow", "") for family in families), refused],
        "socketpair": [  # one of a pair of datagrams may send to any other socket
            (0x20, 24, "", ""),
            (0x54, 0xF, "", ""),
            (0x15, _SOCK_STREAM, "allow", "allow" if unix_sockets else "refuse"),
        ],
        "setrlimit": [(0x20, 16, "", ""), (0x15, resource.RLIMIT_CORE, "refuse", "allow")],
        "prlimit": [
            (0x20, 24, "", ""),
            (0x15, resource.RLIMIT_CORE, "", "allow"),
            (0x20, 32, "", ""),  # both halves of the pointer to a new limit
            (0x15, 0, "", "refuse"),
            (0x20, 36, "", ""),
            (0x15, 0, "allow", "refuse"),
        ],
        "refuse": [refused],
        "none": [(0x06, 0x50026, "", "")],  # ENOSYS
        "allow": [allowed],
    }
    lines = [line for block in blocks.values() for line in block]
    where = dict(zip(blocks, accumulate(map(len, blocks.values()), initial=0), strict=False))

    def jump(here: int, name: str) -> int:
        return where[name] - here - 1 if name else 0

    return [(op, jump(i, yes), jump(i, no), k) for i, (op, k, yes, no) in enumerate(lines)]
