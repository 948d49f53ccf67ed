"""Which examples a client visits in a round, in which order."""

import math

import torch
from torch import Tensor

from fl_privacy.types import LocalPlan


def local_batches(num_examples: int, plan: LocalPlan, rng: torch.Generator) -> list[Tensor]:
    """Index tensors of the local steps of one round, drawn without replacement within each pass.

    A plan without steps and epochs makes one step. A pass of fewer examples than ``batch_size`` is one batch;
    the last batch of an epoch may be short, those of a plan that counts steps are all equally long.
    """
    size = min(plan.batch_size or num_examples, num_examples)
    if plan.epochs is not None:
        return [batch for _ in range(plan.epochs) for batch in torch.randperm(num_examples, generator=rng).split(size)]
    steps = plan.steps or 1
    per_pass = num_examples // size
    passes = math.ceil(steps / per_pass)
    order = [torch.randperm(num_examples, generator=rng)[: per_pass * size].split(size) for _ in range(passes)]
    return [batch for one_pass in order for batch in one_pass][:steps]
