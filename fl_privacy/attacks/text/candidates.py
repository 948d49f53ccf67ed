"""Which tokens were at which positions of any of the texts, by the span of a first block's inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.text.lengths import Lengths
from fl_privacy.attacks.text.spans import Span, entering_block
from fl_privacy.models import TextModel
from fl_privacy.types import Tensors

_AT_ONCE = 1 << 24
"""Elements of embeddings compared at a time."""

CLEAR = 10.0
"""Times nearer than the nearest other token those taken have to be, to be beyond doubt."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Tokens by position.

    Attributes:
        tokens: for each position (n,) those that were there, the nearest first; none, or no position, where no text is
            as long.
        distances: (n,) likewise, of each from the span.
        clear: whether all of them are in the span beyond doubt, and no other is near.
        left_out: how far the nearest other is.
    """

    tokens: Sequence[Tensor]
    distances: Sequence[Tensor]
    clear: bool
    left_out: float = 1.0

    @property
    def length(self) -> int:
        """Of the longest text."""
        return max((p + 1 for p, found in enumerate(self.tokens) if len(found)), default=0)

    @property
    def whole(self) -> bool:
        """Whether there is one at each position of the longest text."""
        return self.length > 0 and all(map(len, self.tokens[: self.length]))

    @property
    def number(self) -> int:
        """Of all pairs of token and position."""
        return sum(map(len, self.tokens))

    def hold(self, texts: Sequence[Tensor]) -> bool:
        """Whether no pair of ``texts`` (L,) was left out, and all that were are so many times farther than theirs."""
        farthest = 0.0
        for text in texts:
            if len(text) > len(self.tokens):
                return False
            for token, tokens, distances in zip(text, self.tokens, self.distances, strict=False):
                apart = distances[tokens == token]
                if not len(apart):
                    return False
                farthest = max(farthest, float(apart.max()))
        return bool(texts) and self.left_out > CLEAR * farthest


def rows_of_words(model: TextModel, gradient: Tensors) -> Tensor | None:
    """(n,) tokens whose embedding got a gradient: all that are in the texts. ``None`` where it was withheld, or where
    nothing in it is zero, as with a head tied to it or noise."""
    found = gradient.get(model.word_weight)
    if found is None:
        return None
    rows = found.abs().amax(1) > 0
    return None if bool(rows.all()) else rows.nonzero().flatten()


def find_candidates(model: TextModel, span: Span, *, tokens: Tensor, lengths: Lengths, tolerance: float) -> Candidates:
    """Every pair of token and position whose embedding is in ``span``.

    Those of a single text are all in it that are in the span. Of several texts others can be as well: the embedding of
    a token at a position is a sum, so that with (v, p), (w, p) and (v, q) the span holds (w, q), in the texts or not.
    Where nobody says how long several texts are, they end in front of the first position that has none, and what lies
    behind it is left out.

    Args:
        model: with the values sent.
        span: of the first block.
        tokens: (n,) that may be in the texts at all.
        lengths: of the texts; where they are told, and fewer tokens are in the span than there have to be, the nearest
            are taken.
        tolerance: distance up to which a pair is in the span, in that of a random vector.
    """
    table = _distances(model, span, tokens, lengths.longest)
    found, distances, nearest_other, doubt = [], [], 1.0, False
    for position in range(lengths.longest):
        reached = lengths.reaching(position)
        order = table[:, position].argsort()
        count = int((table[:, position] < tolerance).sum())
        if lengths.number == 1:
            doubt |= count > 1 or (lengths.told is not None and count != reached)
            count = min(count, 1)
        if lengths.told is not None and reached:
            count = max(count, reached if count == 0 else 1)
        found.append(tokens[order[:count]])
        distances.append(table[order[:count], position])
        if count < len(tokens):
            nearest_other = min(nearest_other, float(table[order[count], position]))
    if lengths.told is None and lengths.number > 1:
        end = next((position for position, some in enumerate(found) if not len(some)), len(found))
        beyond = [float(some[0]) for some in distances[end:] if len(some)]
        nearest_other = min([nearest_other, *beyond])
        found, distances = found[:end], distances[:end]
    farthest = max((float(d.max()) for d in distances if len(d)), default=1.0)
    return Candidates(found, distances, not doubt and nearest_other > CLEAR * farthest, nearest_other)


def _distances(model: TextModel, span: Span, tokens: Tensor, longest: int) -> Tensor:
    """(n, L) of every token at every position; a first block's inputs are each of a single token."""
    parts = []
    for some in torch.split(tokens, max(1, _AT_ONCE // (longest * span.width))):
        parts.append(span.distance(entering_block(model, some[:, None].expand(-1, longest), 0)))
    return torch.cat(parts)
