"""Memory that computations need and may use, settings of the allocator, and devices."""

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
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of ``mallopt`` in glibc's malloc.h

_ALWAYS, _GROWN_TRIM, _GROWN_MMAP, _USUAL_MAX = 2**31 - 1, 64 * 2**20, 32 * 2**20, 1 << 16
"""Values for ``mallopt``: never trim; glibc's adapted trim and mmap thresholds; its usual number of mapped blocks."""


class _Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        made = (each for each in tree_leaves(result) if isinstance(each, Tensor) and not each._is_view())
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in made)
        return result


def written_by(compute: Callable[[], object]) -> int:
    """Return the number of bytes of all intermediate results of ``compute()``."""
    with _Allocated() as allocated:
        compute()
    return int(allocated.bytes)


_processes = [1]


def share_among(processes: int) -> None:
    """Let this process use only one of ``processes`` equal shares of the main memory."""
    _processes[0] = processes


def spare_bytes(device: torch.device) -> int:
    """Return the number of free bytes of ``device`` that one computation may use."""
    if device.type == "cuda":
        return int(_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")) // _processes[0]


_users, _lock = list[None](), Lock()
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Environment variables by which users configure the allocator."""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let the process keep freed memory for reuse until the last such context ends (glibc only).

    It does nothing if the environment configures the allocator (``GLIBC_TUNABLES`` and similar).
    """
    chosen = os.environ.keys() & set(_OF_THE_USER) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    libc = ctypes.CDLL(None) if os.name == "posix" and not chosen else None
    if libc is None or not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    with _lock:
        _users.append(None)
        if len(_users) == 1:
            libc.mallopt(_TRIM_THRESHOLD, _ALWAYS)
            libc.mallopt(_MMAP_MAX, 0)
    try:
        yield
    finally:
        with _lock:
            _users.pop()
            if not _users:
                libc.mallopt(_TRIM_THRESHOLD, _GROWN_TRIM)
                libc.mallopt(_MMAP_THRESHOLD, _GROWN_MMAP)
                libc.mallopt(_MMAP_MAX, _USUAL_MAX)
                libc.malloc_trim(0)


def resolve_device(name: str) -> torch.device:
    """Return the device ``name``; ``auto`` is the first GPU, or else the CPU. ``UserError`` if a device is missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise UserError(f"device is expected to be auto, cpu or cuda, but got {name!r}; take one of them.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda is expected to find a GPU, but PyTorch sees none; use device=cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device={name} is expected to be a GPU, counted from 0, but PyTorch has none such; use device=cuda."
        )
    return device
