"""Find out how much memory a computation writes and there is, keep it between evaluations, and name devices."""

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_privacy.errors import UserError

_SHARE = 0.4

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of ``mallopt`` in glibc's malloc.h."""

_ALWAYS, _GROWN_TRIM, _GROWN_MMAP, _USUAL_MAX = 2**31 - 1, 64 * 2**20, 32 * 2**20, 1 << 16
"""The thresholds that glibc comes to by itself as large blocks are freed, and how many blocks it maps at most."""


class _Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the results of all operations: what the graph keeps, and a little more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and telling so imports the compiler: seconds

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self.bytes += tensor.numel() * tensor.element_size()
        return result


def written_by(compute: Callable[[], object]) -> int:
    """Count the bytes of all intermediate results of ``compute``."""
    with _Allocated() as allocated:
        compute()
    return int(allocated.bytes)


class _Sharing:
    """How many processes share the CPU's memory."""

    processes = 1


_sharing = _Sharing()


def share_among(processes: int) -> None:
    """Leave this process one of ``processes`` equal shares of the CPU's memory from now on."""
    _sharing.processes = processes


def spare_bytes(device: torch.device) -> int:
    """Return the share of the memory free on ``device`` that one computation may take."""
    if device.type == "cuda":
        return int(_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")) // _sharing.processes


class _Keeping:
    """Users of kept memory: the allocator is the process's, whichever thread configures it.

    Attributes:
        users: threads within the context, or contexts within each other.
        lock: of both, so that the last to leave does not undo what another has just begun.
    """

    def __init__(self) -> None:
        self.users, self.lock = 0, Lock()

    def begin(self, libc: Any) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                libc.mallopt(_TRIM_THRESHOLD, _ALWAYS)
                libc.mallopt(_MMAP_MAX, 0)

    def end(self, libc: Any) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                libc.mallopt(_TRIM_THRESHOLD, _GROWN_TRIM)
                libc.mallopt(_MMAP_THRESHOLD, _GROWN_MMAP)
                libc.mallopt(_MMAP_MAX, _USUAL_MAX)
                libc.malloc_trim(0)


_keeping = _Keeping()


def _set_by_the_user() -> bool:
    """Say whether the environment configures the allocator already; the allocator itself can't be asked."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in names) or "glibc.malloc." in tunables


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep memory that is freed within the context in the process, until the last context ends.

    An evaluation frees what the next one needs again; given back in between, the system clears each page anew, which
    took a fifth of the time. Only glibc's allocator can be told. Settings in the environment (``GLIBC_TUNABLES``,
    ``MALLOC_TRIM_THRESHOLD_`` and its like) are left as they are; those that a program made by ``mallopt`` itself can't
    be known, and are glibc's usual ones afterwards.
    """
    libc = ctypes.CDLL(None) if os.name == "posix" and not _set_by_the_user() else None
    if libc is None or not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    _keeping.begin(libc)
    try:
        yield
    finally:
        _keeping.end(libc)


def resolve_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is the first GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise UserError(f"device is expected to be auto, cpu or cuda, but got {name!r}.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda is expected to find a GPU, but PyTorch sees none; use device=cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name} is expected to be a GPU that PyTorch sees, counted from 0; use device=cuda.")
    return device
