"""The evaluation of a problem as the operations that it comes down to: the same numbers with fewer calls."""

import torch
from torch import Tensor, fx

from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.gradients import differentiable_twice

_FEW_VICTIMS = 4
_EVALUATIONS = 1000
_FIRST = 20

_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def recording_pays(victims: int, evaluations: int) -> bool:
    """Whether leaving out autograd wins back the second or some seconds that recording takes.

    Of many victims the numbers take the time, not the calls.
    """
    return victims <= _FEW_VICTIMS and evaluations >= _EVALUATIONS


class RecordedEvaluation:
    """``Problem.evaluate``, whose operations are recorded once and then run without autograd.

    They are the same operations in the same order, so that every bit of the result is, too. The first evaluations,
    which many short attacks do with, and problems of other shapes than the recorded one are not run so.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._shapes: list[torch.Size] | None = None
        self._program: fx.GraphModule | None = None

    def __call__(self, problem: Problem, variables: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (V,) and gradient (V, N)."""
        self._calls += 1
        if self._calls < _FIRST:
            return problem.evaluate(variables)
        tensors = tensors_of(problem)
        shapes = [tensor.shape for tensor in (variables, *tensors)]
        if self._shapes is None:
            self._shapes, self._program = shapes, _recorded(problem, variables, tensors)
        if self._program is None or shapes != self._shapes:
            return problem.evaluate(variables)
        with torch.no_grad():
            loss, gradient = self._program(variables, *tensors)
        return loss, gradient


def tensors_of(problem: Problem) -> list[Tensor]:
    """Those whose rows are victims."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    problem.map(keep)
    return found


def operations(problem: Problem, variables: Tensor, tensors: list[Tensor]) -> fx.GraphModule:
    """What ``problem.evaluate`` does, as a function of the variables and of the problem's tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

    def evaluate(variables: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = iter(tensors)
        return problem.map(lambda _: next(given)).evaluate(variables)

    return make_fx(evaluate)(variables, *tensors)


def _recorded(problem: Problem, variables: Tensor, tensors: list[Tensor]) -> fx.GraphModule | None:
    """``None`` where the operations differ from evaluation to evaluation, or can't be recorded."""
    try:
        program = operations(problem, variables, tensors)
    except RuntimeError:
        return None
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.recompile()
    elsewhere = variables + 1e-3 * torch.arange(variables.shape[1], device=variables.device).sin().to(variables)
    for point in (variables, elsewhere):
        with differentiable_twice(), torch.no_grad():
            found = program(point, *tensors)
        expected = problem.evaluate(point)
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            return None
    return program
