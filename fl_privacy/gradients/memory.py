"""How much memory a computation writes, and how much of it there is."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHARE = 0.4


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
    """Bytes of all results on the way."""
    with _Allocated() as allocated:
        compute()
    return int(allocated.bytes)


def spare_bytes(device: torch.device) -> int:
    """The share of the memory free on ``device`` that one computation may take."""
    if device.type == "cuda":
        return int(_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
