"""The estimated cost of an attack's step on a standard processor, the same on all machines."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fl_privacy.models.unwrap_model import detached_copy, without_checkpointing
from fl_privacy.rng import streams_put_back
from fl_privacy.types import Observation

CALL, PRODUCT = 1e-5, 5e-11
"""Seconds of a standard processor for each PyTorch call and each operation of a matrix product."""


class _Work(TorchDispatchMode):
    calls, products = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, count = func(*args, **(kwargs or {})), flop_registry.get(func._overloadpacket)
        self.calls += 1
        self.products += count(*args, **(kwargs or {}), out_val=out) if count else 0.0
        return out


@without_checkpointing()
def seconds_of_evaluation(observation: Observation) -> float:
    """Estimate a standard processor's seconds for an attack's step: the gradient of a gradient, on gray examples."""
    model = detached_copy(observation.model).train(observation.plan.mode == "train")
    gray = torch.full((observation.upload.num_examples, *observation.input_shape), 0.5, requires_grad=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with streams_put_back(), _Work() as work:
        first = torch.autograd.grad(model(gray).sum(), parameters, create_graph=True, allow_unused=True)
        size = [g.square().sum() for g in first if g is not None and g.requires_grad]
        if size:
            torch.autograd.grad(torch.stack(size).sum(), gray, allow_unused=True)
    return CALL * work.calls + PRODUCT * work.products
