"""What is known of how long the texts of a batch are."""

from dataclasses import dataclass, replace
from typing import Self

from fl_privacy.models import TextModel
from fl_privacy.types import Observation


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of so many texts.

    Attributes:
        number: of the texts.
        longest: no text has more tokens.
        told: the tokens of each, the shortest first; ``None`` where nobody says.
    """

    number: int
    longest: int
    told: tuple[int, ...] | None = None

    @classmethod
    def of(cls, observation: Observation, model: TextModel) -> Self:
        """Of the tokens that spans can hold: of a language model all but the last, which nothing is predicted from.

        Where no lengths are told, the gradient of the positions, if there is one, tells the longest.
        """
        number, longest = observation.upload.num_examples, observation.input_shape[0]
        if observation.knowledge.lengths is not None:
            lengths = sorted((observation.knowledge.lengths - int(model.next_token)).tolist())
            return cls(number=number, longest=lengths[-1], told=tuple(lengths))
        rows = None if model.position_weight is None else observation.update().get(model.position_weight)
        if rows is not None:
            seen = (rows[model.first_position :].abs().amax(1) > 0).nonzero().flatten()
            longest = min(longest, int(seen[-1]) + 1) if len(seen) else longest
        return cls(number=number, longest=longest)

    @property
    def possible(self) -> list[int]:
        """Those of any text, the longest last."""
        return list(range(1, self.longest + 1)) if self.told is None else sorted(set(self.told))

    def reaching(self, position: int) -> int:
        """How many texts have a token at ``position``, at most."""
        return self.number if self.told is None else sum(length > position for length in self.told)

    def within(self, longest: int) -> Self:
        """Where nobody says them, with at most ``longest`` tokens."""
        return self if self.told is not None else replace(self, longest=min(self.longest, longest))

    def hold(self, length: int) -> bool:
        """Whether there may be a text of ``length``."""
        return self.number > 0 and length in self.possible

    def without(self, length: int) -> Self:
        """But for a text of ``length``."""
        if self.told is None:
            return replace(self, number=self.number - 1)
        left = list(self.told)
        left.remove(length)
        return replace(self, number=self.number - 1, longest=left[-1] if left else 0, told=tuple(left))
