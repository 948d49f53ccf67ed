"""Interface of inference attacks: they observe one round after the other, and answer in the end."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fl_privacy.attacks.inference.kinds import About
from fl_privacy.attacks.inference.read_round import ReadRound


class Inference(Protocol):
    """An attack's settings; any object with these members is one."""

    @property
    def about(self) -> About: ...

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "Watch":
        """Prepare for C ``candidates``, the ids of N ``clients`` and K ``classes``, before the first round."""
        ...


class Watch(Protocol):
    """Observes the rounds of a training, in constant memory."""

    def add(self, read: ReadRound) -> None:
        """Process a round, of which nothing may be kept."""
        ...

    def answers(self) -> Mapping[str, Tensor]:
        """Return the answers by method: (C, N) scores, higher for yes, or (N, K) shares for a property."""
        ...

    def titles(self) -> Mapping[str, tuple[str, str]]: ...
