"""What an inference attack is: it is shown one round after the other, and answers in the end."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fl_privacy.attacks.inference.kinds import About
from fl_privacy.attacks.inference.read_round import ReadRound


class Inference(Protocol):
    """An attack by its settings; an object of a user's own that has these is one too."""

    @property
    def about(self) -> About:
        """Return what it asks, by which its answers are judged."""
        ...

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "Watch":
        """Prepare for the candidates before the first round.

        Args:
            candidates: C, how many examples are asked about.
            clients: the ids of all N clients.
            classes: K.
        """
        ...


class Watch(Protocol):
    """Looks at the rounds of a training as they come; what it keeps does not grow with them."""

    def add(self, read: ReadRound) -> None:
        """Take in what a round showed, none of which may be kept."""
        ...

    def answers(self) -> Mapping[str, Tensor]:
        """Return the answers by the name of the method.

        About membership and source: (C, N) scores, higher where the answer is yes. About a property: (N, K) shares.
        """
        ...

    def titles(self) -> Mapping[str, tuple[str, str]]:
        """Return title and source of each method, for pages."""
        ...
