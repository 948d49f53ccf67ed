"""Evaluate a problem on a GPU as one CUDA graph, without Python's delays between kernels."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.execution import agree, tensors_of
from fl_privacy.attacks.gradient_inversion.problem import Problem

logger = logging.getLogger(__name__)

_FIRST = 10
_WARM_UP = 3
_MOST_AT_ONCE = 64
_EVALUATIONS = 60

Run = Callable[[], tuple[Tensor, Tensor]]
Capture = Callable[[Run], tuple[Callable[[], object], tuple[Tensor, Tensor]]]
"""(function to run) -> (function that runs it again, tensors of its results)."""


def capturing_pays(victims: int, evaluations: int) -> bool:
    """Return ``True`` if launching without Python wins back the evaluations that capturing takes."""
    return victims <= _MOST_AT_ONCE and evaluations >= _EVALUATIONS


def capture_on_gpu(run: Run) -> tuple[Callable[[], object], tuple[Tensor, Tensor]]:
    """Capture the kernels that ``run`` launches, after a few runs on their own stream, as PyTorch requires.

    Raises:
        RuntimeError: ``run`` waits for the GPU.
    """
    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph.replay, results


class CapturedEvaluation:
    """``Problem.evaluate``, captured once its shapes have come a few times, if possible."""

    def __init__(self, capture: Capture = capture_on_gpu) -> None:
        self._capture = capture
        self._shapes: list[torch.Size] = []
        self._calls = 0
        self._graph: _Graph | None = None

    def __call__(self, problem: Problem, variables: Tensor) -> tuple[Tensor, Tensor]:
        tensors = tensors_of(problem)
        shapes = [tensor.shape for tensor in (variables, *tensors)]
        if shapes != self._shapes:
            self._shapes, self._calls, self._graph = shapes, 0, None
        self._calls += 1
        if self._calls == _FIRST:
            self._graph = self._captured(problem, variables, tensors)
        return problem.evaluate(variables) if self._graph is None else self._graph(variables, tensors)

    def _captured(self, problem: Problem, variables: Tensor, tensors: Sequence[Tensor]) -> "_Graph | None":
        try:
            graph = _Graph(self._capture, problem, variables, tensors)
        except RuntimeError as error:
            logger.debug("The evaluation is not captured: %s", error)
            return None
        elsewhere = variables + 1e-3 * torch.arange(variables.shape[1], device=variables.device).sin().to(variables)
        points = (variables, elsewhere)
        return graph if all(agree(graph(point, tensors), problem.evaluate(point)) for point in points) else None


class _Graph:
    """An evaluation whose kernels always read and write the same memory."""

    def __init__(self, capture: Capture, problem: Problem, variables: Tensor, tensors: Sequence[Tensor]) -> None:
        self._variables = torch.empty_like(variables)
        self._tensors = [torch.empty_like(tensor) for tensor in tensors]
        self._written: Sequence[Tensor] = []
        self._write(variables, tensors)

        def run() -> tuple[Tensor, Tensor]:
            # a new problem each time, as values cached from its tensors belong to the graph, too
            given = iter(self._tensors)
            return problem.map(lambda _: next(given)).evaluate(self._variables)

        self._replay, self._results = capture(run)

    def __call__(self, variables: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        self._write(variables, tensors)
        self._replay()
        loss, gradient = self._results
        return loss.clone(), gradient.clone()

    def _write(self, variables: Tensor, tensors: Sequence[Tensor]) -> None:
        self._variables.copy_(variables)
        if len(self._written) != len(tensors) or any(a is not b for a, b in zip(self._written, tensors, strict=True)):
            for place, tensor in zip(self._tensors, tensors, strict=True):
                place.copy_(tensor)
            self._written = tensors
