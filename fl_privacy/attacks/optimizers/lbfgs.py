"""L-BFGS of V victims at once, each as ``torch.optim.LBFGS`` would do it alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.optimizers.history import History


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """L-BFGS with a fixed step, as ``torch.optim.LBFGS`` without line search.

    One *iteration* is one ``step`` of the reference: up to ``inner`` moves, fewer where a tolerance is met.

    Attributes:
        lr: step length; the first move is ``lr * min(1, 1 / ||g||_1)``.
        inner: moves per iteration (``max_iter`` of the reference).
        history: pairs kept.
        tolerance_grad: a victim whose largest gradient is below is finished.
        tolerance_change: an iteration ends where a move or a change of the loss is below.
    """

    lr: float = 1.0
    inner: int = 20
    history: int = 100
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9

    def start(self, variables: Tensor, *, iterations: int, images: int) -> "_LBFGSRun":
        """Begin."""
        return _LBFGSRun(self, variables, iterations)

    @property
    def moments(self) -> int:
        """Values of state per variable."""
        return 2 * self.history + 3


class _LBFGSRun:
    """The reference re-evaluates at the start of each iteration where the last one stopped; here that costs nothing.

    Each row is in one of two states: at the start of an iteration (``moves == 0``) or inside one.
    """

    def __init__(self, settings: LBFGS, variables: Tensor, iterations: int) -> None:
        count = len(variables)
        self._settings = settings
        self._iterations = iterations
        self.iteration = torch.zeros(count, dtype=torch.long, device=variables.device)
        self._moves = torch.zeros_like(self.iteration)
        self._fresh = torch.ones_like(self.iteration, dtype=torch.bool)
        self._finished = torch.zeros_like(self._fresh)
        self._history = History(variables, settings.history)
        self._move = torch.zeros_like(variables)
        self._gradient = torch.zeros_like(variables)
        self._loss = variables.new_zeros(count)

    def step(self, variables: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One move of every victim that is not finished; see :class:`OptimizerRun`."""
        settings = self._settings
        flat = gradient.abs().amax(1) <= settings.tolerance_grad
        stalled = self._move.abs().amax(1) <= settings.tolerance_change
        stalled |= (loss - self._loss).abs() < settings.tolerance_change
        stopped = (self._moves > 0) & (flat | stalled)
        self._end(stopped)
        finished = self._finished | (self._moves == 0) & (flat | (self.iteration >= self._iterations))

        learns = ~finished & ~self._fresh
        direction = self._history.direction(gradient, gradient - self._gradient, self._move, learns)
        descends = (gradient * direction).sum(1) <= -settings.tolerance_change
        finished |= ~descends & loss.isfinite()
        rate = torch.where(self._fresh, (1 / gradient.abs().sum(1)).clamp_max(1), 1) * settings.lr
        self._finished, going = finished, ~finished
        move = rate[:, None] * direction
        self._move = torch.where(going[:, None], move, self._move)
        self._gradient = torch.where(going[:, None], gradient, self._gradient)
        self._loss = torch.where(going, loss, self._loss)
        self._fresh &= ~going
        self._moves += going
        used_up = going & (self._moves >= settings.inner)
        self._end(used_up)
        return torch.where(going[:, None], variables + move, variables), used_up | stopped, finished

    def _end(self, rows: Tensor) -> None:
        self.iteration += rows
        self._moves[rows] = 0

    def restart(self, rows: Tensor) -> None:
        """Forget the history of ``rows``."""
        self._history.forget(rows)
        self._fresh |= rows
        self._finished &= ~rows
        self._moves[rows] = 0

    def select(self, rows: Tensor) -> None:
        """Keep ``rows``."""
        self._history.select(rows)
        for name in ("iteration", "_moves", "_fresh", "_finished", "_move", "_gradient", "_loss"):
            setattr(self, name, getattr(self, name)[rows])
