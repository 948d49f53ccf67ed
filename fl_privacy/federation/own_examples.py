"""What a client trains on: its own examples, or what its defense exchanges them for."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.data.examples import Examples
from fl_privacy.defenses import Defense, LocalData
from fl_privacy.types import Batch


@dataclass(frozen=True)
class OwnExamples:
    """``batch`` takes indices below ``number``; ``seconds`` is what the defense took to make them."""

    number: int
    batch: Callable[[Tensor], Batch]
    seconds: float = 0.0

    @classmethod
    def of(cls, examples: Examples, indices: Tensor, device: torch.device | str) -> "OwnExamples":
        """Those of ``examples`` at ``indices``, as they are."""
        return cls(len(indices), lambda chosen: examples.batch(indices[chosen], device))

    @classmethod
    def exchanged(cls, batch: Batch, defense: Defense, data: LocalData) -> "OwnExamples":
        """What ``defense`` makes of ``batch``, all that the client has."""
        started = time.perf_counter()
        for hook in defense.examples:
            batch = hook(batch, data)
        return cls(len(batch), lambda i: Batch(batch.inputs[i], batch.labels[i]), time.perf_counter() - started)
