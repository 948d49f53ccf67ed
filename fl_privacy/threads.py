"""CPU threads of a computation: sums over several threads differ from those over one in their last bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """PyTorch computes with ``number`` threads within the context, however many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
