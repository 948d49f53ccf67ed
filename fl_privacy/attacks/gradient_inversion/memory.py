"""How many victims fit in memory together."""

import logging

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.optimizers import EvolutionStrategy, Optimizer
from fl_privacy.gradients import differentiable_twice
from fl_privacy.gradients.memory import spare_bytes, written_by

logger = logging.getLogger(__name__)

_MOST_ON_CPU, _MOST_ON_GPU = 128, 4096
_SHARE_OF_GPU = 0.35
_BYTES_ON_CPU = 4 * 2**30
"""That one chunk takes; more is hardly faster."""


def written_bytes(problem: Problem, variables: Tensor) -> int:
    """What the computation of the loss of one victim (1, N) writes."""
    with differentiable_twice():
        return written_by(lambda: problem.loss(variables.detach().requires_grad_()))


def victims_at_once(problem: Problem, variables: Tensor, optimizer: Optimizer | EvolutionStrategy) -> int:
    """The chunk size, from a trial with one victim.

    It does not depend on how much memory happens to be free, since sums over other chunks differ in their last bits,
    unless there is too little, which the log says.

    Args:
        problem: of one victim.
        variables: (1, N).
        optimizer: whose state is counted.
    """
    state = optimizer.moments * variables.numel() * variables.element_size()
    observed = sum(target.size for target in problem.rounds[0].targets.values()) * variables.element_size()
    most = _MOST_ON_GPU if variables.is_cuda else _MOST_ON_CPU
    needed = written_bytes(problem, variables) + state + 3 * observed
    wanted = max(1, min(most, _bytes_of_a_chunk(variables.device) // needed))
    fits = max(1, spare_bytes(variables.device) // needed)
    if fits < wanted:
        logger.warning(
            "Memory for %d victims at a time, instead of %d: the last bits of the result will differ.", fits, wanted
        )
    return int(min(wanted, fits))


def _bytes_of_a_chunk(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_SHARE_OF_GPU * torch.cuda.mem_get_info(device)[1])
    return _BYTES_ON_CPU
