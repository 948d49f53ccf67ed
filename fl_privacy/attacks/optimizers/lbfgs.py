"""L-BFGS for V victims at once, each with the steps of ``torch.optim.LBFGS``."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.optimizers.first_order import signed
from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError

_MIN_CURVATURE = 1e-10
_FIRST_CAPACITY = 16


class _Rows:
    """Base of optimizer states, whose tensors, also in nested states, have a row for each victim."""

    def select(self, rows: Tensor) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])
            elif isinstance(value, _Rows):
                value.select(rows)


class History(_Rows):
    """Each victim's latest pairs (s, y) of moves and gradient changes, for L-BFGS, the oldest pair first."""

    def __init__(self, variables: Tensor, limit: int) -> None:
        v, n = variables.shape
        capacity = min(limit, _FIRST_CAPACITY)
        small = variables.new_zeros(0, dtype=torch.float64)
        self._limit = limit
        self._s, self._y = variables.new_zeros(v, capacity, n), variables.new_zeros(v, capacity, n)
        # products of the compact representation (Byrd, Nocedal, Schnabel 1994, Eq. 3.13)
        self._sy = _unit(small.new_zeros(v, capacity, capacity))
        self._yy = small.new_zeros(v, capacity, capacity)
        self._scale = small.new_ones(v)
        self._pushed = torch.zeros(v, dtype=torch.long, device=variables.device)

    def direction(self, gradient: Tensor, y: Tensor, s: Tensor, learns: Tensor) -> Tensor:
        """Add pairs of moves ``s`` and gradient changes ``y`` (V, N), and return the directions -H g (V, N).

        ``learns``: ``True`` for those of V victims whose pair is added; pairs without positive curvature never are.
        """
        curvature = (y * s).sum(1)
        rows = (learns & (curvature > _MIN_CURVATURE)).nonzero().flatten()
        if len(rows):
            self._push(rows, s, y, curvature)
        used = int(self._pushed.max().clamp_max(self._s.shape[1]))
        if used == 0:
            return -gradient
        # in this order, the products run along the pairs as they lie in memory
        both = torch.stack([gradient, y], 1)
        oldest = (self._pushed - self._s.shape[1]).clamp_min(0)
        slots = (oldest[:, None] + torch.arange(used, device=oldest.device)) % self._s.shape[1]
        by_age = slots[:, None].expand(-1, 2, -1)
        s_products = torch.bmm(both, self._s[:, :used].mT).double().gather(2, by_age)
        y_products = torch.bmm(both, self._y[:, :used].mT).double().gather(2, by_age)
        if len(rows):
            newest = self._pushed[rows].clamp_max(self._s.shape[1]) - 1
            self._sy[rows, :used, newest] = s_products[rows, 1]
            self._yy[rows, :used, newest] = y_products[rows, 1]
            self._yy[rows, newest, :used] = y_products[rows, 1]
        # w on s and -scale * a on y, with a = R^-1 S'g and w = R^-T ((D + scale Y'Y) a - scale Y'g)
        sg, yg, dtype = s_products[:, 0], y_products[:, 0], gradient.dtype
        upper, yy, scale = self._sy[:, :used, :used], self._yy[:, :used, :used], self._scale[:, None, None]
        a = torch.linalg.solve_triangular(upper, sg[..., None], upper=True)
        rhs = upper.diagonal(dim1=1, dim2=2)[..., None] * a + scale * (yy @ a - yg[..., None])
        w = torch.linalg.solve_triangular(upper.mT, rhs, upper=False)
        on_s = torch.zeros_like(sg).scatter_(1, slots, w[..., 0])
        on_y = torch.zeros_like(sg).scatter_(1, slots, (-scale * a)[..., 0])
        step = torch.bmm(on_s.to(dtype)[:, None], self._s[:, :used])[:, 0]
        step += torch.bmm(on_y.to(dtype)[:, None], self._y[:, :used])[:, 0]
        return -torch.addcmul(step, self._scale.to(dtype)[:, None], gradient)

    def _push(self, rows: Tensor, s: Tensor, y: Tensor, curvature: Tensor) -> None:
        if int(self._pushed[rows].max()) >= self._s.shape[1] < self._limit:
            old = self._s.shape[1]
            more = min(self._limit, 2 * old) - old
            self._s, self._y = F.pad(self._s, (0, 0, 0, more)), F.pad(self._y, (0, 0, 0, more))
            self._sy, self._yy = F.pad(self._sy, (0, more, 0, more)), F.pad(self._yy, (0, more, 0, more))
            _unit(self._sy[:, old:, old:])
        slots = self._pushed[rows] % self._s.shape[1]
        full = rows[self._pushed[rows] >= self._s.shape[1]]
        if len(full):
            self._sy[full] = F.pad(self._sy[full, 1:, 1:], (0, 1, 0, 1))
            self._yy[full] = F.pad(self._yy[full, 1:, 1:], (0, 1, 0, 1))
        self._s[rows, slots] = s[rows]
        self._y[rows, slots] = y[rows]
        self._scale[rows] = (curvature[rows] / y[rows].square().sum(1)).double()
        self._pushed[rows] += 1

    def forget(self, rows: Tensor) -> None:
        for pairs in (self._s, self._y, self._sy, self._yy):
            pairs[rows] = 0
        self._sy[rows] = _unit(self._sy[rows])
        self._scale[rows] = 1
        self._pushed[rows] = 0


def _unit(matrices: Tensor) -> Tensor:
    matrices.diagonal(dim1=-2, dim2=-1).fill_(1)
    return matrices


_SUFFICIENT, _CURVATURE = 1e-4, 0.9
_NARROW = 1e-9


class StrongWolfe(_Rows):
    """Strong Wolfe line searches (Nocedal, Wright 2006, Alg. 3.5 and 3.6), with scalars in float64.

    Attributes:
        searching: (V,) ``True`` for victims whose line search goes on.
        trials: (V,) number of evaluations in each victim's last search.
        step, loss: (V,) values of the current trial; after the search, of the accepted one.
        gradient: (V, N) at the accepted step.
    """

    def __init__(self, variables: Tensor) -> None:
        count = len(variables)
        scalar = variables.new_zeros(count, dtype=torch.float64)
        self.searching = torch.zeros(count, dtype=torch.bool, device=variables.device)
        self.trials = torch.zeros(count, dtype=torch.long, device=variables.device)
        self.step, self.loss, self.gradient = scalar, scalar, torch.zeros_like(variables)
        self._zooms, self._slow = self.searching, self.searching
        self._rounds = self._most = self.trials
        self._direction, self._first_gradient = torch.zeros_like(variables), torch.zeros_like(variables)
        self._first_loss, self._first_slope = scalar, scalar
        # ends of the bracket, or of the last step before there is one: step, loss, slope (V, 2), gradient
        self._ends = scalar.new_zeros(3, count, 2)
        self._end_gradients = variables.new_zeros(count, 2, variables.shape[1])

    def begin(
        self, rows: Tensor, *, direction: Tensor, loss: Tensor, gradient: Tensor, step: Tensor, most: Tensor
    ) -> None:
        """Begin line searches of ``rows`` (V,) along ``direction`` (V, N), from points with ``loss`` and ``gradient``.

        ``step`` (V,) is the first trial, ``most`` (V,) the largest number of further trials.
        """
        wide, slope = rows[:, None], (gradient * direction).sum(1).double()
        self.searching = self.searching | rows
        self._zooms, self._slow = self._zooms & ~rows, self._slow & ~rows
        self.trials, self._rounds = (values.masked_fill(rows, 0) for values in (self.trials, self._rounds))
        self.step = torch.where(rows, step.double(), self.step)
        self._most = torch.where(rows, most, self._most)
        self._direction = torch.where(wide, direction, self._direction)
        self._first_loss = torch.where(rows, loss.double(), self._first_loss)
        self._first_slope = torch.where(rows, slope, self._first_slope)
        self._first_gradient = torch.where(wide, gradient, self._first_gradient)
        self._set_end(0, rows, (torch.zeros_like(slope), loss.double(), slope), gradient)

    def look(self, loss: Tensor, gradient: Tensor) -> Tensor:
        """Continue line searches from loss (V,) and gradient (V, N) at the trial steps; return a mask of ended ones."""
        trial = self.step, loss.double(), (gradient * self._direction).sum(1).double()
        searching, zooming = self.searching, self.searching & self._zooms
        self.trials = self.trials + searching
        self._rounds = self._rounds + zooming
        flat = trial[2].abs() <= -_CURVATURE * self._first_slope
        rises = trial[1] > self._first_loss + _SUFFICIENT * trial[0] * self._first_slope
        used_up = searching & ~zooming & (self._rounds >= self._most)
        first = torch.zeros_like(self.step), self._first_loss, self._first_slope
        self._set_end(0, used_up, first, self._first_gradient)
        bracketing = searching & ~zooming & ~used_up
        beyond = bracketing & (rises | (self._rounds > 1) & (trial[1] >= self._ends[1, :, 0]))
        found = bracketing & ~beyond & flat
        enclosed = beyond | bracketing & ~found & (trial[2] >= 0)
        extends, last = bracketing & ~found & ~enclosed, self._ends[..., 0]
        further = _cubic_minimum(last, trial, (trial[0] + 0.01 * (trial[0] - last[0]), 10 * trial[0]))
        self._set_end(0, extends, trial, gradient)
        self.step = torch.where(extends, further, self.step)
        self._rounds = self._rounds + extends
        self._set_end(1, enclosed | used_up, trial, gradient)
        self._zooms = self._zooms | enclosed
        found = found | self._narrow(zooming, rises, flat, trial, gradient)
        over = found | used_up | self._choose_within(self._zooms & searching & ~found)
        accepted, low = over & ~found, self._low()
        step, least, _ = self._end(low)
        self.step = torch.where(accepted, step, self.step)
        self.loss = torch.where(found, trial[1], torch.where(accepted, least, self.loss))
        self.gradient = torch.where(accepted[:, None], self._end_gradient(low), self.gradient)
        self.gradient = torch.where(found[:, None], gradient, self.gradient)
        self.searching = searching & ~over
        return over

    def _narrow(self, rows: Tensor, rises: Tensor, flat: Tensor, trial: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        low = self._low()
        low_end, high_end = self._end(low), self._end(1 - low)
        worse = rows & (rises | (trial[1] >= low_end[1]))
        better = rows & ~worse
        turns = better & ~flat & (trial[2] * (high_end[0] - low_end[0]) >= 0)
        low_gradient = self._end_gradient(low)
        for end in (0, 1):
            is_low = low == end
            self._set_end(end, turns & ~is_low, low_end, low_gradient)
            self._set_end(end, worse & ~is_low | better & is_low, trial, gradient)
        return better & flat

    def _choose_within(self, rows: Tensor) -> Tensor:
        ends = self._ends[0]
        least, most = ends.amin(1), ends.amax(1)
        narrow = (most - least) * self._direction.abs().amax(1).double() < _NARROW
        over = rows & (narrow | (self._rounds >= self._most))
        step = _cubic_minimum(self._ends[..., 0], self._ends[..., 1], (least, most))
        margin = 0.1 * (most - least)
        near = torch.minimum(most - step, step - least) < margin
        moved = near & (self._slow | (step >= most) | (step <= least))
        inward = torch.where((step - most).abs() < (step - least).abs(), most - margin, least + margin)
        self.step = torch.where(rows & ~over, torch.where(moved, inward, step), self.step)
        self._slow = torch.where(rows & ~over, near & ~moved, self._slow)
        return over

    def _low(self) -> Tensor:
        return (self._ends[1, :, 0] > self._ends[1, :, 1]).long()

    def _end(self, which: Tensor) -> tuple[Tensor, ...]:
        return tuple(values.gather(1, which[:, None])[:, 0] for values in self._ends)

    def _end_gradient(self, which: Tensor) -> Tensor:
        return self._end_gradients[torch.arange(len(which), device=which.device), which]

    def _set_end(self, end: int, rows: Tensor, values: tuple[Tensor, ...], gradient: Tensor) -> None:
        for kept, value in zip(self._ends, values, strict=True):
            kept[:, end] = torch.where(rows, value, kept[:, end])
        self._end_gradients[:, end] = torch.where(rows[:, None], gradient, self._end_gradients[:, end])

    def select(self, rows: Tensor) -> None:
        self._ends = self._ends.transpose(0, 1)
        super().select(rows)
        self._ends = self._ends.transpose(0, 1)


def _cubic_minimum(
    one: Tensor | tuple[Tensor, ...], other: Tensor | tuple[Tensor, ...], bounds: tuple[Tensor, Tensor]
) -> Tensor:
    (x1, f1, g1), (x2, f2, g2) = one, other
    d1 = g1 + g2 - 3 * (f1 - f2) / (x1 - x2)
    square = d1.square() - g1 * g2
    d2 = square.clamp_min(0).sqrt()
    forward = x2 - (x2 - x1) * ((g2 + d2 - d1) / (g2 - g1 + 2 * d2))
    backward = x1 - (x1 - x2) * ((g1 + d2 - d1) / (g1 - g2 + 2 * d2))
    within = torch.minimum(torch.maximum(torch.where(x1 <= x2, forward, backward), bounds[0]), bounds[1])
    return torch.where(square >= 0, within, (bounds[0] + bounds[1]) / 2)


LineSearch = Literal["none", "strong_wolfe"]


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """L-BFGS as ``torch.optim.LBFGS``, with or without its strong Wolfe line search.

    An *iteration* is one ``step`` of the reference: up to ``inner`` moves, fewer if a tolerance is met.
    """

    lr: float = 1.0  # step length; the first move is ``lr * min(1, 1 / ||g||_1)``
    inner: int = 20  # moves per iteration (``max_iter`` of the reference)
    history: int = 100
    tolerance_grad: float = 1e-7  # largest entry of a finished victim's gradient
    tolerance_change: float = 1e-9  # move, or change of the loss, below which an iteration ends
    line_search: LineSearch = "none"  # ``none`` always takes ``lr``, as published attacks do
    sign: Literal["none", "hard"] = "none"  # sign of the pixels' gradient, ``none`` or ``hard``; not with a line search

    def __post_init__(self) -> None:
        number("attack.lr", self.lr, above=0, example=0.1)
        for name in ("inner", "history"):
            whole(f"attack.{name}", getattr(self, name), at_least=1, example=20)
        if self.line_search not in ("none", "strong_wolfe"):
            raise UserError(
                f"line_search is expected to be none or strong_wolfe, but got {self.line_search!r}; set one."
            )
        if self.sign != "none" and self.line_search != "none":
            raise UserError(f"sign=none is expected with a line search, but got {self.sign}; use line_search=none.")

    def start(self, variables: Tensor, *, iterations: int, images: int) -> "_LBFGSRun":
        return (_LBFGSRun if self.line_search == "none" else _SearchingRun)(self, variables, iterations, images)

    @property
    def moments(self) -> int:
        return 2 * self.history + (3 if self.line_search == "none" else 8)


class _LBFGSRun(_Rows):
    def __init__(self, settings: LBFGS, variables: Tensor, iterations: int, images: int) -> None:
        self._settings, self._images, self._iterations = settings, images, iterations
        self.iteration = torch.zeros(len(variables), dtype=torch.long, device=variables.device)
        self._moves = torch.zeros_like(self.iteration)
        self._fresh = torch.ones_like(self.iteration, dtype=torch.bool)
        self._finished = torch.zeros_like(self._fresh)
        self._history = History(variables, settings.history)
        self._move, self._gradient = torch.zeros_like(variables), torch.zeros_like(variables)
        self._loss = variables.new_zeros(len(variables))

    def step(self, variables: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        settings = self._settings
        gradient = signed(gradient, settings.sign, self._images, 1.0)
        flat = gradient.abs().amax(1) <= settings.tolerance_grad
        stalled = self._move.abs().amax(1) <= settings.tolerance_change
        stalled |= (loss - self._loss).abs() < settings.tolerance_change
        stopped = (self._moves > 0) & (flat | stalled)
        self._end(stopped)
        self._finished = self._finished | (self._moves == 0) & (flat | (self.iteration >= self._iterations))
        going, direction, rate = self._go_on(~self._finished, loss, gradient)
        move = rate[:, None] * direction
        self._move = torch.where(going[:, None], move, self._move)
        self._moves += going
        used_up = going & (self._moves >= settings.inner)
        self._end(used_up)
        return torch.where(going[:, None], variables + move, variables), used_up | stopped, self._finished

    def _go_on(self, rows: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pair = gradient - self._gradient, self._move
        direction = self._history.direction(gradient, *pair, rows & ~self._fresh)
        descends = (gradient * direction).sum(1) <= -self._settings.tolerance_change
        self._finished = self._finished | rows & ~descends & loss.isfinite()
        going = rows & ~self._finished
        rate = torch.where(self._fresh, (1 / gradient.abs().sum(1)).clamp_max(1), 1) * self._settings.lr
        self._gradient = torch.where(going[:, None], gradient, self._gradient)
        self._loss = torch.where(going, loss, self._loss)
        self._fresh &= ~going
        return going, direction, rate

    def _end(self, rows: Tensor) -> None:
        self.iteration += rows
        self._moves[rows] = 0

    def restart(self, rows: Tensor) -> None:
        self._history.forget(rows)
        self._fresh |= rows
        self._finished &= ~rows
        self._moves[rows] = 0


class _SearchingRun(_LBFGSRun):
    def __init__(self, settings: LBFGS, variables: Tensor, iterations: int, images: int) -> None:
        super().__init__(settings, variables, iterations, images)
        self._search = StrongWolfe(variables)
        self._evaluations = torch.zeros_like(self.iteration)
        self._from = variables
        self._direction = torch.zeros_like(variables)

    def step(self, variables: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        going, direction, rate = self._go_on((begins | over & ~ended) & ~self._finished, loss, gradient)
        left = settings.inner * 5 // 4 - self._evaluations
        search.begin(going, direction=direction, loss=loss, gradient=gradient, step=rate, most=left)
        wide = going[:, None]
        self._from = torch.where(wide, point, self._from)
        self._direction = torch.where(wide, direction, self._direction)
        trial = self._from + search.step[:, None].to(variables.dtype) * self._direction
        return torch.where(search.searching[:, None], trial, point), ended, self._finished

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        self._search.searching = self._search.searching & ~rows
