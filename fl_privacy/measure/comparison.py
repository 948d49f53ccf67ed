"""Compare guesses with originals and distractors in every way, at one resolution."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.measure.descriptors import Moved, Sight, Standing, largest
from fl_privacy.measure.outcome import LEAD
from fl_privacy.measure.public_images import PublicImages
from fl_privacy.measure.turning import Way

RIVALS = 10
"""Nearest candidates for the foreign share of a guess."""

LUCK = 0.3
"""Lead gained by luck with e = 2.7 times as many guesses, or that many times fewer candidates:
1 over the largest of 1,000 normal strengths, since the gap between the largest two is exponential."""

LUCK_OF_MORE = LUCK * math.log(10)
"""Lead gained by luck with further ways to compare."""

ENOUGH = 1000
"""Number of candidates from which a lead is not reduced."""

_CEILING = 0.9995  # correlation above which differences are rounding of pixels

TIE = 1e-3
"""Difference, in spreads of the candidates, that is rounding."""

_LEAST_SPREAD = 0.01  # least spread of candidates, so that a blank guess is near none of them
_LEAST_REST = 1e-3  # least share of a row beyond the common part of two images that is not rounding


@dataclass(frozen=True, kw_only=True, eq=False)
class Identified:
    """Likeness of each original of a batch of B to the guesses at the batch.

    Attributes:
        guess: (B,) index of the most similar guess.
        likeness: (B,) largest absolute correlation with that guess, in [0, 1], over the ways in which the original
            leads enough; without any, in the way of the best lead.
        rank: (B,) rank among itself and the candidates in that way; 1 is nearest. ``None`` without candidates.
        lead: (B,) largest lead over the nearest candidate, in standard deviations of the candidates, minus the gain by
            luck; negative if it leads in no way.
        foreign: (B,) largest partial correlation of the guess with a near candidate given the original, in [0, 1]: the
            smaller one for the best lead and the largest likeness. NaN if the original is not nearest.
    """

    guess: Tensor
    likeness: Tensor
    rank: Tensor | None = None
    lead: Tensor | None = None
    foreign: Tensor | None = None
    candidates: int = 0

    @property
    def figures(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("guess", "likeness", "rank", "lead", "foreign")}
        return {name: figure for name, figure in named.items() if figure is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """G guesses at a batch of B originals, compared with R rivals at one resolution.

    Attributes:
        guesses: (G, C, H, W) in [0, 1].
        originals: (B, C, H, W) in [0, 1].
        rivals: (R,) indices of the rivals, sorted.
        usual: (U,) indices that define the usual correlation.
    """

    guesses: Tensor
    originals: Tensor
    others: PublicImages
    rivals: Tensor
    usual: Tensor
    sight: Sight

    def ranked(self, candidates: int) -> Identified:
        raw, own, rest = (each.flatten(0, 1) for each in self._strengths)
        leads = own - rest.amax(1, keepdim=True) - luck(len(self.guesses), candidates)
        lead, first = leads.max(0)
        place = torch.where(lead >= LEAD, raw.masked_fill(leads < LEAD, -1.0).argmax(0), first)
        best = own.gather(0, place[None])[0]
        rank = 1 + (rest[place] >= best[:, None] - TIE).sum(1)
        foreign = torch.full(rank.shape, math.nan)
        for b in (rank == 1).nonzero().flatten().tolist():
            foreign[b] = min(self._foreign(b, at) for at in {int(first[b]), int(place[b])})
        guess, likeness = place // self._strengths[1].shape[1], raw.gather(0, place[None])[0].clamp(0, 1)
        return Identified(guess=guess, likeness=likeness, rank=rank, lead=lead, foreign=foreign, candidates=candidates)

    def nearest(self, number: int) -> Tensor:
        best = self._strengths[2].flatten(0, 1).amax(0)
        return self.rivals[best.topk(min(number, len(best))).indices]

    def behind(self) -> Tensor:
        """Count the rivals nearer to the guesses than each original (B,), each in its nearest way."""
        own, best = self._strengths[1].flatten(0, 1).amax(0), self._strengths[2].flatten(0, 1).amax(0)
        return (best[None] >= own[:, None] - TIE).sum(1)

    @cached_property
    def _strengths(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return correlations (G, W, B) of W ways, their strengths (G, W, B), and the rivals' strengths (G, W, R)."""
        at = torch.searchsorted(self.rivals, self.usual)
        raws, owns, rests = [], [], []
        for number in range(len(self.guesses)):
            own, rest = (torch.stack(each) for each in zip(*self._correlations(number), strict=True))
            strengths = relative(own, rest, at)
            raws.append(own)
            owns.append(strengths[0])
            rests.append(strengths[1])
        return torch.stack(raws), torch.stack(owns), torch.stack(rests)

    def _correlations(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each way a guess's largest absolute correlations with originals (B,) and rivals (R,)."""
        seen = Moved(self.guesses[number : number + 1], self.sight)
        for of, to, window in self.sight.ways:
            places = seen.rows(of, window)
            rows = self.others.standing(self.sight).rows(to, window)
            rows = rows if len(rows) == len(self.rivals) else rows[self.rivals]
            yield largest(places, self._own.rows(to, window)), largest(places, rows)

    @cached_property
    def _own(self) -> Standing:
        return Standing(self.originals, self.sight)

    def _foreign(self, original: int, at: int) -> float:
        """Return the foreign share of guess and way ``at``, given an original."""
        number, way = divmod(at, self._strengths[1].shape[1])
        seen = Moved(self.guesses[number : number + 1], self.sight)
        near = self._strengths[2][number, way].topk(min(RIVALS, len(self.rivals))).indices
        own, rivals = self.originals[original : original + 1], self.others.rivals[self.rivals[near]]
        of, to, window = list(self.sight.ways)[way]
        rows = seen.rows(of, window)
        truth = Standing(own, self.sight).rows(to, window)[0]
        shown = rows[int((rows @ truth).abs().argmax())]
        return shared_beyond(shown, truth, Standing(rivals, self.sight).rows(to, window))


def best_of(ways: Sequence[Sequence[Way]], candidates: int) -> Identified:
    """Rank originals by the best of further ``ways``, (guesses, ways); their leads are reduced by ``LUCK_OF_MORE``."""
    every = [(number, way) for number, own in enumerate(ways) for way in own]
    strengths = [relative(way.own[None], way.rest[None], way.usual) for _, way in every]
    leads = torch.stack([own[0] - rest.amax() for own, rest in strengths]) - luck(len(ways), candidates) - LUCK_OF_MORE
    lead, place = leads.max(0)
    found = []
    for original, at in enumerate(place.tolist()):
        (number, way), (own, rest) = every[at], strengths[at]
        rank = 1 + int((rest >= own[0, original] - TIE).sum())
        near = way.rivals[rest[0].topk(min(RIVALS, len(way.rivals))).indices]
        foreign = shared_beyond(*way.rows(original, near)) if rank == 1 else math.nan
        found.append((number, float(way.own[original].clamp(0, 1)), rank, foreign))
    guess, likeness, ranks, shared = (torch.tensor(each) for each in zip(*found, strict=True))
    return Identified(guess=guess, likeness=likeness, rank=ranks, lead=lead, foreign=shared, candidates=candidates)


def luck(guesses: int, candidates: int) -> float:
    """Return the lead that several guesses, or few candidates, gain by luck."""
    return LUCK * math.log(guesses * max(1.0, ENOUGH / max(1, candidates)))


def relative(own: Tensor, rest: Tensor, usual: Tensor) -> tuple[Tensor, Tensor]:
    """Turn correlations (W, B) and (W, R) into Fisher's z relative to the usual ones of that way."""
    z_own, z_rest = (torch.atanh(found.clamp(max=_CEILING)) for found in (own, rest))
    every = z_rest[:, usual]
    mean, spread = every.mean(1, keepdim=True), every.std(1, keepdim=True, unbiased=False) + _LEAST_SPREAD
    return (z_own - mean) / spread, (z_rest - mean) / spread


def shared_beyond(shown: Tensor, truth: Tensor, rivals: Tensor) -> float:
    """Return the largest partial correlation of unit rows ``shown`` (D,) and ``rivals`` (K, D), given ``truth``."""
    of_truth, of_rivals, between = shown @ truth, rivals @ shown, rivals @ truth
    rest = ((1 - of_truth**2).clamp_min(_LEAST_REST) * (1 - between**2).clamp_min(_LEAST_REST)).sqrt()
    return float(((of_rivals - of_truth * between) / rest).abs().amax().clamp(0, 1))
