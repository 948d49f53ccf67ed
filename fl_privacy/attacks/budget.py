"""How many victims fit in memory together."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_privacy.attacks.optimizers import Optimizer
from fl_privacy.attacks.problem import Problem
from fl_privacy.attacks.victim_gradients import differentiable_twice

_MOST_ON_CPU, _MOST_ON_GPU = 128, 4096
_SHARE = 0.4


class _Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the results of all operations: what the graph keeps, and a little more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self.bytes += tensor.numel() * tensor.element_size()
        return result


def written_bytes(problem: Problem, variables: Tensor) -> int:
    """What the computation of the loss of one victim (1, N) writes."""
    with differentiable_twice():
        return written_by(lambda: problem.loss(variables.detach().requires_grad_()))


def written_by(compute: Callable[[], object]) -> int:
    """Bytes of all results on the way."""
    with _Allocated() as allocated:
        compute()
    return int(allocated.bytes)


def victims_at_once(problem: Problem, variables: Tensor, optimizer: Optimizer) -> int:
    """The chunk size, from a trial with one victim.

    Args:
        problem: of one victim.
        variables: (1, N).
        optimizer: whose state is counted.
    """
    state = optimizer.moments * variables.numel() * variables.element_size()
    observed = sum(target.size for target in problem.targets.values()) * variables.element_size()
    most = _MOST_ON_GPU if variables.is_cuda else _MOST_ON_CPU
    needed = written_bytes(problem, variables) + state + 3 * observed
    return int(max(1, min(most, spare_bytes(variables.device) // needed)))


def spare_bytes(device: torch.device) -> int:
    """The share of the memory free on ``device`` that one computation may take."""
    if device.type == "cuda":
        return int(_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
