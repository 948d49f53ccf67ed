"""The evaluation of a problem as one compiled program, where that compiling_pays."""

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.gradient_inversion.recording import operations, tensors_of
from fl_privacy.errors import UserError
from fl_privacy.gradients import differentiable_twice
from fl_privacy.gradients.strided import for_a_compiler

ValueAndGradient = Callable[[Problem, Tensor], tuple[Tensor, Tensor]]
"""(problem, variables (V, N)) -> loss (V,) and gradient (V, N)."""

_Program = Callable[..., tuple[Tensor, Tensor]]

_TOLERANCE = 1e-3
_WRITTEN_MEANWHILE = 2e10
_TENSORS_AT_LEAST = 20
_RUNS_ON_GPU = 10_000
_WARM_UP_ON_GPU = 3


def compiler() -> str | None:
    """Path of the C++ compiler that ``torch.compile`` asks for; ``None`` where there is none."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", usual))


def check_compiler() -> None:
    """Refuse to go on without a compiler.

    Raises:
        UserError: there is none.
    """
    if compiler() is None:
        raise UserError(
            "attack.compile=on is expected to find a C++ compiler, but there is none;"
            " install g++, name one in CXX, or use attack.compile=off."
        )


def compiling_pays(device: torch.device, *, runs: int, written: float, tensors: int) -> bool:
    """Whether a compiled program wins back the time that compiling takes.

    All is counted and nothing measured, so that the answer is the same each time. On a CPU fused operations save a
    fifth to a quarter of the time, which grows with what is written; compiling takes one thread some seconds for each
    tensor (LeNet, ConvNet, ResNet-20: 50, 110, 170 s on a busy machine). A GPU saves the time between operations, which
    is the same for few victims and many.

    Args:
        device: of the computation.
        runs: of the program.
        written: bytes in all runs.
        tensors: that are matched.
    """
    if compiler() is None:
        return False
    if device.type == "cuda":
        return runs > _RUNS_ON_GPU
    return written > _WRITTEN_MEANWHILE * torch.get_num_threads() * (_TENSORS_AT_LEAST + tensors)


class CompiledEvaluation:
    """``Problem.evaluate``, compiled for the shapes of the first call; problems of other shapes are not.

    A program that fails to compile or gives other numbers is not used, which a warning says.

    Args:
        demanded: to compile or to fail.
    """

    def __init__(self, *, demanded: bool) -> None:
        self._demanded = demanded
        self._shapes: list[torch.Size] | None = None
        self._program: _Program | None = None

    def __call__(self, problem: Problem, variables: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (V,) and gradient (V, N).

        Raises:
            UserError: the program does not compile, but is demanded.
        """
        tensors = tensors_of(problem)
        shapes = [tensor.shape for tensor in (variables, *tensors)]
        if self._shapes is None:
            self._shapes, self._program = shapes, self._make(problem, variables, tensors)
        if self._program is None or shapes != self._shapes:
            return problem.evaluate(variables)
        return self._program(variables, *tensors)

    def _make(self, problem: Problem, variables: Tensor, tensors: Sequence[Tensor]) -> _Program | None:
        try:
            program = _compiled(problem, variables, tensors)
            for _ in range(_WARM_UP_ON_GPU if variables.is_cuda else 1):
                found = program(variables, *tensors)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            if self._demanded:
                raise UserError(
                    f"attack.compile=on is expected to compile, but got: {reason}; use attack.compile=off."
                ) from error
            warnings.warn(f"The attack goes on without being compiled: {reason}", stacklevel=2)
            return None
        if _agree(found, problem.evaluate(variables)):
            return program
        warnings.warn("The attack goes on without being compiled, which gives other numbers.", stacklevel=2)
        return None


def _compiled(problem: Problem, variables: Tensor, tensors: Sequence[Tensor]) -> _Program:
    """The double backward pass is unrolled by tracing first, since ``torch.compile`` itself does not follow it."""
    with for_a_compiler():
        graph = operations(problem, variables, list(tensors))
    mode = "reduce-overhead" if variables.is_cuda else None
    program = torch.compile(graph, fullgraph=True, dynamic=False, mode=mode)

    def run(variables: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        with differentiable_twice(), torch.no_grad():
            loss, gradient = program(variables, *tensors)
        # the next run on a GPU writes to the same memory
        return (loss.clone(), gradient.clone()) if loss.is_cuda else (loss, gradient)

    return run


def _agree(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Victim by victim, where the expected values are finite."""
    rows = [values.reshape(len(values), -1) for values in (*found, *expected)]
    return all(
        bool(((a - b).norm(dim=1) <= _TOLERANCE * b.norm(dim=1))[b.isfinite().all(1)].all())
        for a, b in zip(rows[:2], rows[2:], strict=True)
    )
