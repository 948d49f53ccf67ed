"""How many victims fit in memory together."""

from torch import Tensor

from fl_privacy.attacks.optimizers import Optimizer
from fl_privacy.attacks.problem import Problem
from fl_privacy.gradients import differentiable_twice
from fl_privacy.gradients.memory import spare_bytes, written_by

_MOST_ON_CPU, _MOST_ON_GPU = 128, 4096


def written_bytes(problem: Problem, variables: Tensor) -> int:
    """What the computation of the loss of one victim (1, N) writes."""
    with differentiable_twice():
        return written_by(lambda: problem.loss(variables.detach().requires_grad_()))


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
