"""Evaluate a problem faster: compiled, recorded or as a CUDA graph, in chunks that fit into memory."""

import logging
import math
import operator
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, fx, nn

from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.attacks.optimizers import EvolutionStrategy, Optimizer
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import convolution, differentiable_twice, hooks, memory
from fl_privacy.rng import cpu_threads

ValueAndGradient = Callable[[Problem, Tensor], tuple[Tensor, Tensor]]
"""(problem, variables (V, N)) -> loss (V,) and gradient (V, N)."""

Program = Callable[..., tuple[Tensor, Tensor]]  # (variables, *tensors of the problem) -> loss and gradient
_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class FasterEvaluation:
    """Evaluator that replaces ``Problem.evaluate`` by a faster program for fixed shapes, if one can be made."""

    made_at: ClassVar[int] = 1  # number of the call at which the program is made
    renewed: ClassVar[bool] = False  # ``True`` counts calls anew at other shapes
    most: ClassVar[float] = math.inf  # most victims for which making it pays
    least: ClassVar[int] = 0  # fewest evaluations for which making it pays

    def __init__(self) -> None:
        self._calls = 0
        self._shapes: list[torch.Size] = []
        self._program: Program | None = None

    def __call__(self, problem: Problem, variables: Tensor) -> tuple[Tensor, Tensor]:
        tensors = tensors_of(problem)
        shapes = [tensor.shape for tensor in (variables, *tensors)]
        if self.renewed and shapes != self._shapes:
            self._shapes, self._calls, self._program = shapes, 0, None
        self._calls += 1
        if self._calls == self.made_at:
            self._shapes, self._program = shapes, self.make(problem, variables, tensors)
        if self._program is None or shapes != self._shapes:
            return problem.evaluate(variables)
        return self._program(variables, *tensors)

    def make(self, problem: Problem, variables: Tensor, tensors: list[Tensor]) -> Program | None:
        """Return a faster program (variables, *``tensors``) -> (loss, gradient); ``None`` if there is none."""
        raise NotImplementedError

    @classmethod
    def pays(cls, victims: int, evaluations: int) -> bool:
        return victims <= cls.most and evaluations >= cls.least


class RecordedEvaluation(FasterEvaluation):
    """Evaluator that records ``Problem.evaluate`` once and reruns it without autograd, with bit-identical results."""

    made_at, most, least = 20, 4, 1000

    def make(self, problem: Problem, variables: Tensor, tensors: list[Tensor]) -> Program | None:
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
        run = torch.no_grad()(program)
        for point in _two_points(variables):
            with differentiable_twice():
                found = run(point, *tensors)
            if not all(map(torch.equal, found, problem.evaluate(point))):
                return None
        return run


def _two_points(variables: Tensor) -> tuple[Tensor, Tensor]:
    moves = 1e-3 * torch.arange(variables.shape[1], device=variables.device).sin().to(variables)
    return variables, variables + moves


def tensors_of(problem: Problem) -> list[Tensor]:
    """List the tensors in ``problem`` whose first axis runs over the victims (attacked uploads)."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    problem.map(keep)
    return found


def operations(problem: Problem, variables: Tensor, tensors: list[Tensor]) -> fx.GraphModule:
    """Trace ``problem.evaluate`` into a graph; its inputs are ``variables`` (V, N) and the problem's ``tensors``."""
    from torch._guards import TracingContext, tracing  # noqa: PLC0415
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

    # one mode for the shapes of all values: else each value gets a mode of its own, in most of the time of tracing
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(partial(_evaluate, problem))(variables, *tensors)


def _evaluate(problem: Problem, variables: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    given = iter(tensors)
    return problem.map(lambda _: next(given)).evaluate(variables)


_TOLERANCE = 1e-3
_WRITTEN_MEANWHILE = 2e10
_TENSORS_AT_LEAST = 20
_RUNS_ON_GPU = 10_000
_WARM_UP_ON_GPU = 3


def compiler() -> str | None:
    """Return the path of a C++ compiler for ``torch.compile``; ``None`` if there is none."""
    return shutil.which(os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")))


def compiling_pays(device: torch.device, *, runs: int, written: float, tensors: int) -> bool:
    """Return whether compiling likely saves more time than it takes.

    On a CPU, savings grow with ``written``, the bytes written in all evaluations, and costs with ``tensors``, the
    number of gradient tensors that are compared. On a GPU, savings grow with ``runs``, the number of evaluations.
    """
    if compiler() is None:
        return False
    if device.type == "cuda":
        return runs > _RUNS_ON_GPU
    return written > _WRITTEN_MEANWHILE * torch.get_num_threads() * (_TENSORS_AT_LEAST + tensors)


class CompiledEvaluation(FasterEvaluation):
    """Evaluator that compiles ``Problem.evaluate`` for the shapes of the first call.

    If compiling changes numbers or fails, it warns and evaluates uncompiled; if ``demanded``, a failure is a
    ``UserError``.
    """

    def __init__(self, *, demanded: bool) -> None:
        super().__init__()
        self._demanded = demanded

    def make(self, problem: Problem, variables: Tensor, tensors: list[Tensor]) -> Program | None:
        if not variables.is_cuda:  # else processes start that compile for a GPU alone, and each loads PyTorch
            os.environ.setdefault("TORCH_WARM_POOL", "0")
        try:
            program = _compiled(problem, variables, tensors)
            for _ in range(_WARM_UP_ON_GPU if variables.is_cuda else 1):
                found = program(variables, *tensors)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            if self._demanded:
                raise UserError(f"Compiled code is expected, but got: {reason}; use attack.compile=off.") from error
            warnings.warn(f"The attack goes on without being compiled: {reason}; set attack.compile=off.", stacklevel=2)
            return None
        if agree(found, problem.evaluate(variables)):
            return program
        warnings.warn(
            "The attack goes on uncompiled, as compiling changes numbers; set attack.compile=off.", stacklevel=2
        )
        return None


def _compiled(problem: Problem, variables: Tensor, tensors: list[Tensor]) -> Program:
    with convolution.for_a_compiler():
        graph = operations(problem, variables, tensors)
    mode = "reduce-overhead" if variables.is_cuda else None
    program = torch.compile(graph, fullgraph=True, dynamic=False, mode=mode)

    def run(variables: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        with differentiable_twice(), torch.no_grad():
            loss, gradient = program(variables, *tensors)
        # the next run on a GPU writes to the same memory
        return (loss.clone(), gradient.clone()) if loss.is_cuda else (loss, gradient)

    return run


def agree(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Return whether loss and gradient in ``found`` are within 0.1 % of those ``expected``, if these are finite."""
    rows = [values.reshape(len(values), -1) for values in (*found, *expected)]
    return all(
        bool(((a - b).norm(dim=1) <= _TOLERANCE * b.norm(dim=1))[b.isfinite().all(1)].all())
        for a, b in zip(rows[:2], rows[2:], strict=True)
    )


logger: logging.Logger = logging.getLogger(__name__)
_MOST_ON_CPU, _MOST_ON_GPU = 128, 4096
_SHARE_OF_GPU = 0.35
_BYTES_ON_CPU = 4 * 2**30  # memory of one chunk; more is hardly faster


def written_bytes(problem: Problem, variables: Tensor) -> int:
    """Return the bytes written by computing the loss of one victim with ``variables`` (1, N)."""
    with differentiable_twice():
        return memory.written_by(lambda: problem.loss(variables.detach().requires_grad_()))


def victims_at_once(
    problem: Problem, variables: Tensor, optimizer: Optimizer | EvolutionStrategy, *, victims: int
) -> int:
    """Return how many victims fit into memory at once, measured by evaluating one with ``variables`` (1, N)."""
    state = optimizer.moments * variables.numel() * variables.element_size()
    observed = sum(target.size for target in problem.rounds[0].targets.values()) * variables.element_size()
    most = _MOST_ON_GPU if variables.is_cuda else _MOST_ON_CPU
    needed = written_bytes(problem, variables) + state + 3 * observed
    wanted = max(1, min(most, _bytes_of_a_chunk(variables.device) // needed))
    fits = max(1, memory.spare_bytes(variables.device) // needed)
    if fits < min(wanted, victims):
        logger.warning(
            "Free memory holds %d victims at a time instead of %d, which changes the last bits of the result;"
            " attack.most_victims=%d repeats it elsewhere.",
            fits,
            min(wanted, victims),
            fits,
        )
    return int(min(wanted, fits))


def _bytes_of_a_chunk(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_SHARE_OF_GPU * torch.cuda.mem_get_info(device)[1])
    return _BYTES_ON_CPU


WORTHWHILE = 20_000_000
"""Number of a layer's multiplications, over all images, from which several threads are used: about a millisecond.
Below, threads that share cores with another process wait up to a hundred times longer than they compute."""


@contextmanager
def fitting_threads(multiplications: int) -> Iterator[None]:
    """Keep freed memory for reuse, and use one CPU thread if layers have too few ``multiplications`` for several."""
    with memory.freed_memory_kept(), cpu_threads(1 if multiplications < WORTHWHILE else torch.get_num_threads()):
        yield


@torch.no_grad()
def multiplications_of_a_layer(model: nn.Module, inputs: Tensor) -> int:
    """Return the mean number of multiplications in a layer of ``model`` for ``inputs``."""
    with cpu_threads(1), hooks.leaving(hooks.owners(model)) as calls:
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


Run = Callable[[], tuple[Tensor, Tensor]]
Capture = Callable[[Run], tuple[Callable[[], object], tuple[Tensor, Tensor]]]
"""(function to run) -> (function that runs it again, tensors of its results)."""


def capture_on_gpu(run: Run) -> tuple[Callable[[], object], tuple[Tensor, Tensor]]:
    """Capture ``run`` in a CUDA graph; return its replay and results; ``RuntimeError`` if it waits for the GPU."""
    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        for _ in range(_WARM_UP_ON_GPU):
            run()
    torch.cuda.current_stream().wait_stream(own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph.replay, results


class CapturedEvaluation(FasterEvaluation):
    """Evaluator that captures ``Problem.evaluate`` as a CUDA graph after several calls with the same shapes."""

    made_at, renewed, most, least = 10, True, 64, 60

    def __init__(self, capture: Capture = capture_on_gpu) -> None:
        super().__init__()
        self._capture = capture

    def make(self, problem: Problem, variables: Tensor, tensors: list[Tensor]) -> Program | None:
        try:
            program = _captured(self._capture, problem, variables, tensors)
        except RuntimeError as error:
            logger.debug("The evaluation is not captured: %s", error)
            return None
        points = _two_points(variables)
        return program if all(agree(program(point, *tensors), problem.evaluate(point)) for point in points) else None


def _captured(capture: Capture, problem: Problem, variables: Tensor, tensors: list[Tensor]) -> Program:
    own, places, written = torch.empty_like(variables), [torch.empty_like(tensor) for tensor in tensors], list[Tensor]()

    def write(variables: Tensor, *tensors: Tensor) -> None:
        own.copy_(variables)
        if not written or any(map(operator.is_not, written, tensors)):
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor)
            written[:] = tensors

    write(variables, *tensors)
    replay, results = capture(lambda: _evaluate(problem, own, *places))

    def program(variables: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        write(variables, *tensors)
        replay()
        return results[0].clone(), results[1].clone()

    return program
