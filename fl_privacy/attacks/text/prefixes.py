"""Texts of a decoder, prefix by prefix: what a token becomes depends on those before it alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.text.candidates import CLEAR, Candidates
from fl_privacy.attacks.text.spans import Span, entering_block
from fl_privacy.models import TextModel

_AT_ONCE = 256
_MOST_PREFIXES = 4096
_TOLD_APART = 100.0
"""Times farther than the nearest continuation the farthest has to be, to be known for a wrong one."""
_ROUNDED = 1e-6
"""How far those in the span may be by rounding in single precision."""


@dataclass(frozen=True, eq=False)
class Grown:
    """Texts that no token continues, the longest first, fewer where some are equal; how far the worst is from the span,
    and whether every prefix that was given up is so many times farther than any of theirs."""

    texts: list[Tensor]
    apart: float
    clear: bool


def grow_prefixes(model: TextModel, span: Span, candidates: Candidates, *, tolerance: float, texts: int) -> Grown:
    """Take every token on that becomes something in the span behind a prefix.

    Args:
        model: with the values sent.
        span: of the second block.
        candidates: of the first.
        tolerance: distance up to which what a token becomes is in the span.
        texts: how many there are.
    """
    prefixes, scores = candidates.tokens[0][:, None], candidates.distances[0]
    farthest = torch.zeros_like(scores)
    finished: list[tuple[float, float, Tensor]] = []
    nearest_given_up, within, complete = 1.0, tolerance, True
    for position in range(candidates.length + 1):
        if position:
            tokens = candidates.tokens[position] if position < candidates.length else prefixes.new_empty(0)
            longer = torch.cat([prefixes.repeat_interleave(len(tokens), 0), tokens.repeat(len(prefixes))[:, None]], 1)
        else:
            tokens, longer = candidates.tokens[0], prefixes
        apart = _apart(model, span, longer)
        within = _within(apart, within, tolerance)
        kept = apart < within
        nearest_given_up = min(nearest_given_up, float(apart[~kept].min()) if bool((~kept).any()) else 1.0)
        if position:
            ended = ~kept.reshape(len(prefixes), len(tokens)).any(1)
            rows = ended.nonzero().flatten().tolist()
            finished += [(float(scores[row]), float(farthest[row]), prefixes[row]) for row in rows]
            farthest = farthest.repeat_interleave(len(tokens))
        farthest = torch.maximum(farthest, apart)[kept][:_MOST_PREFIXES]
        prefixes, scores = longer[kept][:_MOST_PREFIXES], apart[kept][:_MOST_PREFIXES]
        complete &= int(kept.sum()) <= _MOST_PREFIXES
        if not len(prefixes):
            break
    finished.sort(key=lambda text: (-len(text[2]), text[0]))
    finished, number = finished[:texts], len(finished)
    clear = complete and 0 < number <= texts and nearest_given_up > CLEAR * max(far for _, far, _ in finished)
    worst = max((score for score, _, _ in finished), default=1.0)
    return Grown([prefix for _, _, prefix in finished], worst, clear)


def _within(apart: Tensor, before: float, tolerance: float) -> float:
    """Distance up to which a prefix is one: ``tolerance`` of that of wrong ones, where such are among those tried.

    What a token becomes depends mostly on itself, so that wrong prefixes are far nearer than random vectors.
    """
    if not len(apart) or float(apart.max()) < _TOLD_APART * max(float(apart.min()), _ROUNDED):
        return before
    return min(before, tolerance * float(apart.max()))


def _apart(model: TextModel, span: Span, prefixes: Tensor) -> Tensor:
    """(n,) how far from the span is what the last token of each prefix (n, L) becomes."""
    if not prefixes.numel():
        return span.basis.new_empty(0)
    return torch.cat([span.distance(entering_block(model, part, 1)[:, -1]) for part in torch.split(prefixes, _AT_ONCE)])
