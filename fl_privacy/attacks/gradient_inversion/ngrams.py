"""How likely texts are, by a small language model of public ones."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_ORDER = 3
_DISCOUNT = 0.75


@dataclass(frozen=True, eq=False)
class _Counts:
    """Of sequences of n tokens, and of what goes before their last.

    Attributes:
        keys: sorted numbers of the sequences that there are.
        counts: (of each) how often.
        contexts: sorted numbers of what goes before.
        totals: how often each of these.
        followers: how many different tokens follow each.
    """

    keys: Tensor
    counts: Tensor
    contexts: Tensor
    totals: Tensor
    followers: Tensor


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """Trigrams with absolute discounting, interpolated with bigrams, words and all tokens alike (Ney et al. 1994).

    Of a few hundred public texts such counts say more than a transformer learns; who has a large corpus of the domain
    hands over more texts.

    Attributes:
        texts: (N, L) public tokens at the left, -1 where there is none.
        size: tokens of the vocabulary.
    """

    texts: Tensor
    size: int

    @torch.no_grad()
    def surprise(self, tokens: Tensor) -> Tensor:
        """Texts (n, L) -> (n,) mean negative log likelihood of their tokens, natural; 0 of none."""
        there = tokens >= 0
        likelihood = torch.full(tokens.shape, 1 / self.size, dtype=torch.float64)
        for length, counts in enumerate(self._counts, start=1):
            keys = self._keys(tokens, length)
            contexts = keys // self._base
            total, followers = (_found(counts.contexts, which, contexts) for which in (counts.totals, counts.followers))
            seen = _found(counts.keys, counts.counts, keys)
            share = ((seen - _DISCOUNT).clamp_min(0) + _DISCOUNT * followers * likelihood) / total.clamp_min(1)
            likelihood = torch.where(total > 0, share, likelihood)
        surprise = -likelihood.log().masked_fill(~there, 0)
        return surprise.sum(1) / there.sum(1).clamp_min(1)

    @property
    def _base(self) -> int:
        return self.size + 1

    def _keys(self, tokens: Tensor, length: int) -> Tensor:
        """(n, L) the number of the ``length`` tokens up to each; the beginning is a token of its own."""
        begun = torch.nn.functional.pad(tokens.long().clamp_min(0), (length - 1, 0), value=self.size)
        keys = torch.zeros_like(tokens, dtype=torch.long)
        for part in begun.unfold(1, length, 1).unbind(-1):
            keys = keys * self._base + part
        return keys

    @cached_property
    def _counts(self) -> list[_Counts]:
        return [self._counted(length) for length in range(1, _ORDER + 1)]

    def _counted(self, length: int) -> _Counts:
        texts = self.texts.cpu().long()
        keys, counts = torch.unique(self._keys(texts, length)[texts >= 0], return_counts=True)
        contexts, whose = torch.unique(keys // self._base, return_inverse=True)
        totals = torch.zeros(len(contexts), dtype=torch.long).index_add_(0, whose, counts)
        return _Counts(keys, counts, contexts, totals, whose.bincount(minlength=len(contexts)))


def _found(keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    """What ``values`` say of the sorted ``keys`` for each of ``wanted``; 0 where there is no such key."""
    at = torch.searchsorted(keys, wanted).clamp_max(max(0, len(keys) - 1))
    return torch.where(keys[at] == wanted, values[at], 0).double()
