"""L-BFGS of V victims at once, each as ``torch.optim.LBFGS`` would do it alone."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_privacy.attacks.optimizers.base import expect_rate
from fl_privacy.attacks.optimizers.first_order import signed
from fl_privacy.attacks.optimizers.history import History
from fl_privacy.attacks.optimizers.line_search import StrongWolfe
from fl_privacy.errors import UserError

LineSearch = Literal["none", "strong_wolfe"]


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """L-BFGS as ``torch.optim.LBFGS``, with its strong Wolfe line search or without.

    One *iteration* is one ``step`` of the reference: up to ``inner`` moves, fewer where a tolerance is met.

    Attributes:
        lr: step length; the first move is ``lr * min(1, 1 / ||g||_1)``.
        inner: moves per iteration (``max_iter`` of the reference).
        history: pairs kept.
        tolerance_grad: a victim whose largest gradient is below is finished.
        tolerance_change: an iteration ends where a move or a change of the loss is below.
        line_search: of the step length; ``none`` always takes ``lr``, as published attacks do.
        sign: of the pixels' gradient that enters, ``none`` or ``hard``; not with a line search.
    """

    lr: float = 1.0
    inner: int = 20
    history: int = 100
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9
    line_search: LineSearch = "none"
    sign: Literal["none", "hard"] = "none"

    def __post_init__(self) -> None:
        expect_rate("attack.lr", self.lr)
        for name in ("inner", "history"):
            if getattr(self, name) < 1:
                raise UserError(f"attack.{name} is expected to be at least 1, but got {getattr(self, name)}; try 20.")
        if self.line_search not in ("none", "strong_wolfe"):
            raise UserError(f"line_search is expected to be none or strong_wolfe, but got {self.line_search!r}.")
        if self.sign != "none" and self.line_search != "none":
            raise UserError("A line search needs the gradient itself, but its sign is asked for; use line_search=none.")

    def start(self, variables: Tensor, *, iterations: int, images: int) -> "_LBFGSRun":
        return (_LBFGSRun if self.line_search == "none" else _SearchingRun)(self, variables, iterations, images)

    @property
    def moments(self) -> int:
        return 2 * self.history + (3 if self.line_search == "none" else 8)


class _LBFGSRun:
    """The reference re-evaluates at the start of each iteration where the last one stopped; here that costs nothing.

    Each row is in one of two states: at the start of an iteration (``moves == 0``) or inside one.
    """

    def __init__(self, settings: LBFGS, variables: Tensor, iterations: int, images: int) -> None:
        count = len(variables)
        self._settings = settings
        self._images = images
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
        gradient = signed(gradient, settings.sign, self._images, 1.0)
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
        self._history.select(rows)
        for name in ("iteration", "_moves", "_fresh", "_finished", "_move", "_gradient", "_loss"):
            setattr(self, name, getattr(self, name)[rows])


class _SearchingRun(_LBFGSRun):
    """Besides the states of :class:`_LBFGSRun`, a row may be at a trial of its line search."""

    def __init__(self, settings: LBFGS, variables: Tensor, iterations: int, images: int) -> None:
        super().__init__(settings, variables, iterations, images)
        self._search = StrongWolfe(variables)
        self._evaluations = torch.zeros_like(self.iteration)
        self._from = variables
        self._direction = torch.zeros_like(variables)

    def step(self, variables: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One evaluation of every victim that is not finished; see :class:`OptimizerRun`."""
        settings, search = self._settings, self._search
        begins = ~search.searching & ~self._finished
        over = search.look(loss, gradient)
        self._move = torch.where(over[:, None], search.step[:, None].to(variables.dtype) * self._direction, self._move)
        point = torch.where(over[:, None], self._from + self._move, variables)
        loss = torch.where(over, search.loss.to(loss.dtype), loss)
        gradient = torch.where(over[:, None], search.gradient, gradient)
        flat = gradient.abs().amax(1) <= settings.tolerance_grad
        self._moves += over
        self._evaluations += over * search.trials
        ended = over & (
            (self._moves >= settings.inner)
            | (self._evaluations >= settings.inner * 5 // 4)
            | flat
            | (self._move.abs().amax(1) <= settings.tolerance_change)
            | ((loss - self._loss).abs() < settings.tolerance_change)
        )
        self._end(ended)
        self._evaluations = torch.where(begins, 1, self._evaluations)
        self._finished = self._finished | begins & (flat | (self.iteration >= self._iterations))

        going = (begins | over & ~ended) & ~self._finished
        pair = gradient - self._gradient, self._move
        direction = self._history.direction(gradient, *pair, going & ~self._fresh)
        descends = (gradient * direction).sum(1) <= -settings.tolerance_change
        self._finished = self._finished | going & ~descends & loss.isfinite()
        going &= ~self._finished
        rate = torch.where(self._fresh, (1 / gradient.abs().sum(1)).clamp_max(1), 1) * settings.lr
        left = settings.inner * 5 // 4 - self._evaluations
        search.begin(going, direction=direction, loss=loss, gradient=gradient, step=rate, most=left)
        wide = going[:, None]
        self._from, self._direction = (
            torch.where(wide, point, self._from),
            torch.where(wide, direction, self._direction),
        )
        self._gradient = torch.where(wide, gradient, self._gradient)
        self._loss = torch.where(going, loss, self._loss)
        self._fresh &= ~going
        trial = self._from + search.step[:, None].to(variables.dtype) * self._direction
        return torch.where(search.searching[:, None], trial, point), ended, self._finished

    def restart(self, rows: Tensor) -> None:
        """Forget the history and the search of ``rows``."""
        super().restart(rows)
        self._search.stop(rows)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._search.select(rows)
        for name in ("_evaluations", "_from", "_direction"):
            setattr(self, name, getattr(self, name)[rows])
