"""The rate of two large matrices' product, beside which experiments say what share of the machine they use.

Not a command of its own.
"""

import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode


def peak_rate(size: int = 1024, times: int = 8) -> float:
    """Measure operations per second of CPU time on large matrix products."""
    one, other = torch.randn(2, size, size)
    began = time.process_time()
    for _ in range(times):
        one @ other
    return times * 2 * size**3 / (time.process_time() - began)


def operations(work: Callable[[], object]) -> int:
    """Count the operations of the products and convolutions in ``work``."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())
