"""The tokens of a tokenizer, and texts made of them again."""

from collections.abc import Iterable
from dataclasses import dataclass

_SPACES = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n"})
"""How byte-level and SentencePiece tokenizers write a space, and the former a line's end."""


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

    def words(self, numbers: Iterable[int]) -> list[int]:
        """Those of ``numbers`` that are tokens and not special."""
        return [number for number in numbers if number >= 0 and number not in self.special]


def as_shown(piece: str) -> tuple[str, bool]:
    """A token as a person reads it, and whether it goes on with the word before it."""
    if piece.startswith("##"):
        return piece[2:], True
    readable = piece.translate(_SPACES)
    return readable.strip(" ") or readable, False
