"""How many CPU threads an attack is worth: operations that are over in microseconds wait longer than they compute."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fl_privacy.gradients.memory import freed_memory_kept
from fl_privacy.gradients.watch import leaving, owners
from fl_privacy.rng import cpu_threads

WORTHWHILE = 20_000_000
"""Multiplications of a layer, for all images together, from which more than one thread is used: about a millisecond.
Below, threads that share their cores with another process wait for each other up to a hundred times longer than they
compute, and win little where they don't."""


@contextmanager
def fitting_threads(multiplications: int) -> Iterator[None]:
    """One CPU thread within the context where a layer takes less than ``WORTHWHILE``, else as many as were set.

    Memory that is freed stays for the next evaluation.
    """
    with freed_memory_kept(), cpu_threads(1 if multiplications < WORTHWHILE else torch.get_num_threads()):
        yield


@torch.no_grad()
def multiplications_of_a_layer(model: nn.Module, inputs: Tensor) -> int:
    """Of ``inputs`` (V, B, ...), in the mean over the layers of ``model`` that multiply by a matrix or convolve."""
    with cpu_threads(1), leaving(owners(model)) as calls:
        model(inputs[0])
    numbers = [_multiplications(call.module, call.inputs, call.output) for call in calls]
    found = [number for number in numbers if number]
    return len(inputs) * sum(found) // max(1, len(found))


def _multiplications(module: nn.Module, inputs: Tensor, output: Tensor) -> int:
    weights = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
    if isinstance(module, nn.modules.conv._ConvNd):
        return weights * output.numel() // output.shape[1]
    if isinstance(module, nn.Linear | nn.MultiheadAttention):
        return weights * inputs.numel() // inputs.shape[-1]
    return 0
