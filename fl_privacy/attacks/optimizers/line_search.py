"""The line search of ``torch.optim.LBFGS`` for V victims: strong Wolfe (Nocedal, Wright 2006, Alg. 3.5 and 3.6)."""

import torch
from torch import Tensor

_SUFFICIENT, _CURVATURE = 1e-4, 0.9
_NARROW = 1e-9


class StrongWolfe:
    """Searches under way. A row first looks for a bracket and then zooms into it; all scalars are kept in float64.

    Attributes:
        searching: (V,) rows whose next evaluation is a trial.
        trials: (V,) evaluations of the row's last search.
        step, loss: (V,) of the trial, and of the accepted one once the search is over.
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
        # the ends of the bracket, before there is one those of the last step: step, loss, slope (V, 2), gradient
        self._ends = scalar.new_zeros(3, count, 2)
        self._end_gradients = variables.new_zeros(count, 2, variables.shape[1])

    def begin(
        self, rows: Tensor, *, direction: Tensor, loss: Tensor, gradient: Tensor, step: Tensor, most: Tensor
    ) -> None:
        """Search where ``rows``.

        Args:
            rows: (V,) bool.
            direction: (V, N).
            loss: (V,) where the search begins.
            gradient: (V, N) there.
            step: (V,) of the first trial.
            most: (V,) trials after the first.
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
        """Take up the evaluation of the trials; returns the rows (V,) whose search is over."""
        trial = self.step, loss.double(), (gradient * self._direction).sum(1).double()
        searching, zooming = self.searching, self.searching & self._zooms
        self.trials = self.trials + searching
        self._rounds = self._rounds + zooming
        flat = trial[2].abs() <= -_CURVATURE * self._first_slope
        rises = trial[1] > self._first_loss + _SUFFICIENT * trial[0] * self._first_slope

        used_up = searching & ~zooming & (self._rounds >= self._most)
        self._set_end(
            0, used_up, (torch.zeros_like(self.step), self._first_loss, self._first_slope), self._first_gradient
        )
        bracketing = searching & ~zooming & ~used_up
        beyond = bracketing & (rises | (self._rounds > 1) & (trial[1] >= self._ends[1, :, 0]))
        found = bracketing & ~beyond & flat
        enclosed = beyond | bracketing & ~found & (trial[2] >= 0)
        self._extend(bracketing & ~found & ~enclosed, trial, gradient)
        self._set_end(1, enclosed | used_up, trial, gradient)
        self._zooms = self._zooms | enclosed
        found = found | self._narrow(zooming, rises, flat, trial, gradient)
        over = found | used_up | self._choose_within(self._zooms & searching & ~found)
        self._accept(over & ~found)
        self.loss = torch.where(found, trial[1], self.loss)
        self.gradient = torch.where(found[:, None], gradient, self.gradient)
        self.searching = searching & ~over
        return over

    def _extend(self, rows: Tensor, trial: tuple[Tensor, ...], gradient: Tensor) -> None:
        """Go further along the direction."""
        last = self._ends[..., 0]
        bounds = trial[0] + 0.01 * (trial[0] - last[0]), 10 * trial[0]
        further = _cubic_minimum(last, trial, bounds)
        self._set_end(0, rows, trial, gradient)
        self.step = torch.where(rows, further, self.step)
        self._rounds = self._rounds + rows

    def _narrow(self, rows: Tensor, rises: Tensor, flat: Tensor, trial: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """Replace an end of the bracket by the trial; returns the rows where it is good enough."""
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
        """The next trial within the bracket; returns the rows where it is too narrow or the trials are used up."""
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

    def _accept(self, rows: Tensor) -> None:
        """The better end of the bracket."""
        low = self._low()
        step, loss, _ = self._end(low)
        self.step, self.loss = torch.where(rows, step, self.step), torch.where(rows, loss, self.loss)
        self.gradient = torch.where(rows[:, None], self._end_gradient(low), self.gradient)

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

    def stop(self, rows: Tensor) -> None:
        """Give up the searches of ``rows`` (V,) bool."""
        self.searching = self.searching & ~rows

    def select(self, rows: Tensor) -> None:
        """Keep the victims ``rows``."""
        self._ends = self._ends[:, rows]
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "_ends":
                setattr(self, name, value[rows])


def _cubic_minimum(
    one: Tensor | tuple[Tensor, ...], other: Tensor | tuple[Tensor, ...], bounds: tuple[Tensor, Tensor]
) -> Tensor:
    """Where the cubic through two (step, loss, slope) is least within ``bounds``; their middle where it has none."""
    (x1, f1, g1), (x2, f2, g2) = one, other
    d1 = g1 + g2 - 3 * (f1 - f2) / (x1 - x2)
    square = d1.square() - g1 * g2
    d2 = square.clamp_min(0).sqrt()
    forward = x2 - (x2 - x1) * ((g2 + d2 - d1) / (g2 - g1 + 2 * d2))
    backward = x1 - (x1 - x2) * ((g1 + d2 - d1) / (g1 - g2 + 2 * d2))
    least = torch.where(x1 <= x2, forward, backward)
    within = torch.minimum(torch.maximum(least, bounds[0]), bounds[1])
    return torch.where(square >= 0, within, (bounds[0] + bounds[1]) / 2)
