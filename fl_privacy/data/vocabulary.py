"""The tokens of a tokenizer, and texts made of them again."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.pieces import BEGINNINGS, as_shown


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens by number.

    Attributes:
        tokens: as the tokenizer writes them.
        special: numbers of those that stand for nothing in a text, such as its beginning.
    """

    tokens: tuple[str, ...]
    special: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.tokens)

    def pieces(self, numbers: Iterable[int]) -> list[str]:
        """The tokens of a text; what is no token is left out."""
        return [self.tokens[number] for number in numbers if 0 <= number < len(self.tokens)]

    def words(self, numbers: Iterable[int]) -> list[str]:
        """The words of a text, of its tokens that are not special."""
        found: list[str] = []
        for piece in self.pieces(number for number in numbers if number not in self.special):
            shown, goes_on = as_shown(piece)
            if found and (goes_on or (self._begins_words and not piece.startswith(BEGINNINGS))):
                found[-1] += shown
            else:
                found.append(shown)
        return found

    def word_numbers(self, tokens: Tensor) -> Tensor:
        """Tokens (N, L) -> words (N, W) as numbers, alike for equal words; -1 fills up both."""
        rows = [[zlib.crc32(word.encode()) for word in self.words(row)] for row in tokens.tolist()]
        width = max(1, max(map(len, rows), default=1))
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.long).reshape(-1, width)

    @cached_property
    def _begins_words(self) -> bool:
        """Whether tokens that begin a word say so, rather than those that go on with one."""
        return any(token.startswith(BEGINNINGS) for token in self.tokens)
