"""What a descent has found: the best of each victim, its losses, and who is still at work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_privacy.film import shots

_HISTORY = 100


@dataclass(frozen=True, eq=False)
class Minimum:
    """The best of each victim: variables (V, N), loss (V,) and losses (T, V), thinned and nan once it had finished.

    Of filmed victims also what was the best (N,) at some rows of the history.
    """

    variables: Tensor
    loss: Tensor
    history: Tensor
    snapshots: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)


class Standing:
    """Of the victims in the batch, those that have finished until :meth:`select` takes them out.

    Attributes:
        active: their numbers.
        best: variables (V, N) with the lowest loss so far.
        best_loss: (V,).
        rescued_at: (V,) the best loss when a victim last went back to it.
        over: (V,) who has finished.
        any_broken: whether the last loss or gradient of any was not finite.
        share_done: of all work, those taken out included.
        snapped: rows of the batch of which a snapshot was just taken.
    """

    def __init__(self, variables: Tensor, iterations: int, filmed: Sequence[int] = ()) -> None:
        count = len(variables)
        self._iterations = iterations
        self._stride = max(1, iterations // _HISTORY)
        self.active = list(range(count))
        self.best = variables.clone()
        self.best_loss = torch.full((count,), torch.inf, dtype=variables.dtype, device=variables.device)
        self.rescued_at = torch.full_like(self.best_loss, torch.nan)
        self.over = torch.zeros(count, dtype=torch.bool, device=variables.device)
        self.any_broken = False
        self.share_done = 0.0
        self.snapped: list[int] = []
        history = variables.new_full((iterations // self._stride + 1, count), torch.nan)
        self._snapshots: dict[int, dict[int, Tensor]] = {victim: {} for victim in filmed}
        self._shots = shots(len(history)) if filmed else frozenset()
        self._found = Minimum(self.best.clone(), self.best_loss.clone(), history, self._snapshots)
        self._rows_over = [False] * count
        self._stretch = [0] * count
        self._due = list(range(count))

    def learn(self, variables: Tensor, loss: Tensor, broken: Tensor) -> None:
        """Keep what is better than before, and the first loss of each stretch of iterations."""
        self.any_broken = bool(broken.any())
        better = loss < self.best_loss
        if self.any_broken:
            better &= ~broken
        if any(self._rows_over):
            better &= ~self.over
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.best = torch.where(better[:, None], variables, self.best)
        self.snapped = []
        if self._due:
            values = loss.tolist()
            rows = [row for row in self._due if values[row] == values[row]]
            at, whose = [self._stretch[row] for row in rows], [self.active[row] for row in rows]
            self._found.history[at, whose] = loss[rows]
            for row, moment, victim in zip(rows, at, whose, strict=True):
                if moment in self._shots and victim in self._snapshots:
                    self._snapshots[victim][moment] = self.best[row].clone()
                    self.snapped.append(row)
            self._due = [row for row in self._due if values[row] != values[row]]

    def note(self, over: Tensor, iteration: Tensor) -> int:
        """Those who are ``over`` (V,) now, and the ``iteration`` (V,) of the others; returns how many are left."""
        self.over = self.over | over
        self._rows_over = self.over.tolist()
        done = iteration.tolist()
        stretch = [at // self._stride for at in done]
        if stretch != self._stretch or len(self._due):
            due = {row for row, at in enumerate(stretch) if at != self._stretch[row]} | set(self._due)
            self._due = [row for row in sorted(due) if not self._rows_over[row]]
            self._stretch = stretch
        gone = sum(self._rows_over)
        work = sum(at for at, over in zip(done, self._rows_over, strict=True) if not over)
        count = self._found.history.shape[1]
        self.share_done = (count - len(done) + gone + work / self._iterations) / count
        return len(done) - gone

    def select(self, rows: Tensor) -> None:
        """Take all but ``rows`` (indices) out of the batch."""
        self._keep()
        kept = rows.tolist()
        self.active = [self.active[row] for row in kept]
        self.best, self.best_loss = self.best[rows], self.best_loss[rows]
        self.rescued_at, self.over = self.rescued_at[rows], self.over[rows]
        self._rows_over = [self._rows_over[row] for row in kept]
        self._stretch = [self._stretch[row] for row in kept]
        self._due = [number for number, row in enumerate(kept) if row in self._due]

    def minimum(self) -> Minimum:
        """Of all victims."""
        self._keep()
        return self._found

    def _keep(self) -> None:
        self._found.variables[self.active] = self.best
        self._found.loss[self.active] = self.best_loss
