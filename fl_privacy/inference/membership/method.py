"""What every membership attack is: statistics of examples and clients that are added up over rounds."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_privacy.inference.read_round import ReadRound


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What methods can be told.

    Attributes:
        shadows: models that are trained in a round by those that train some.
        shadow_rounds: the last so many of the rounds read are those.
    """

    shadows: int = 64
    shadow_rounds: int = 1


class MembershipMethod(ABC):
    """Was an example among what a client trains on? A score for each pair, from one round after the other.

    What is kept is as large after a hundred rounds as after one: sums over rounds for each example and client.

    Attributes:
        title: for pages.
        source: who says so.
    """

    title: ClassVar[str]
    source: ClassVar[str]

    def __init__(self, candidates: int, clients: Sequence[int], options: MethodOptions) -> None:
        self.options = options
        self._columns = {client: column for column, client in enumerate(clients)}
        self._total = torch.zeros(candidates, len(clients), dtype=torch.float64)
        self._rounds = torch.zeros(candidates, len(clients))

    def add(self, read: ReadRound) -> None:
        """Take in what was read in a round; what is not finite says nothing."""
        found = self.evidence(read).double()
        columns = torch.tensor([self._columns[client] for client in read.clients])
        finite = found.isfinite()
        self._total[:, columns] += found.where(finite, 0.0)
        self._rounds[:, columns] += finite.to(self._rounds.dtype)

    def scores(self) -> Tensor:
        """(C, N) mean over the rounds, higher for members; NaN for clients that were never read."""
        return torch.where(self._rounds > 0, self._total / self._rounds.clamp(min=1), torch.nan)

    @abstractmethod
    def evidence(self, read: ReadRound) -> Tensor:
        """(C, K) of one round, higher for members."""
