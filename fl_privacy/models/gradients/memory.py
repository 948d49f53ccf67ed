"""Memory of computations, allocator settings and device names."""

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
"""Thresholds that glibc adapts to as large blocks are freed, and its limit of mapped blocks."""


class _Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sum of all operations' results: the graph's memory, and a little more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled; the default would import the compiler for seconds

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
    processes = 1


_sharing = _Sharing()


def share_among(processes: int) -> None:
    """Restrict this process to one of ``processes`` equal shares of the CPU's memory."""
    _sharing.processes = processes


def spare_bytes(device: torch.device) -> int:
    """Return the free memory of ``device`` that one computation may take."""
    if device.type == "cuda":
        return int(_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")) // _sharing.processes


class _Keeping:
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
    """Return ``True`` if the environment configures the allocator, which can't be queried."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in names) or "glibc.malloc." in tunables


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep memory freed within the context in the process (glibc only), until the last context ends.

    Settings in the environment (``GLIBC_TUNABLES`` and similar) are respected; earlier ``mallopt`` settings are reset.
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
    """Return the device ``name``; ``auto`` is the first GPU if there is one."""
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
