"""Identification of a guess's original among candidates that were never attacked, up to harmless changes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional

from fl_privacy.errors import UserError
from fl_privacy.measure.descriptors import (
    COARSE,
    FINE,
    Descriptors,
    DescriptorScale,
    Latest,
    ShiftedDescriptors,
    largest,
    shift_reach,
    small,
)
from fl_privacy.measure.images import psnr, ssim
from fl_privacy.measure.outcome import LEAD, SAME, SURE, GuessComparison
from fl_privacy.measure.turning import HOPELESS, LEAST_SIDE, NEAREST, Gallery, Turning, Way, gallery_of

ALIKE = 3  # most public images that count as of the same scene as an original


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicImages:
    """Public images (distractors), from which a guess must single out its original; none of them is attacked."""

    images: Tensor  # (N, C, H, W) in [0, 1]
    labels: Tensor | None = None  # (N,) classes, if known
    name: str = "public images"
    more: Tensor | None = None  # further images (M, C, H, W) uint8, only searched for the nearest one
    # cache: original and label -> largest PSNR and SSIM without an update
    controls: dict[tuple[bytes, int | None], tuple[float, float]] = field(default_factory=dict, repr=False)
    # cache: original -> lead and likeness of the nearest public image
    near: dict[bytes, tuple[float, float]] = field(default_factory=dict, repr=False)
    # cache: content of guesses, originals and controls -> figures of the comparison
    compared: dict[object, list[GuessComparison]] = field(default_factory=dict, repr=False)

    @cached_property
    def mean(self) -> Tensor:
        return self.images.mean(0)

    @cached_property
    def class_means(self) -> dict[int, Tensor]:
        if self.labels is None:
            return {}
        return {label: self.images[self.labels == label].mean(0) for label in sorted(set(self.labels.tolist()))}

    @cached_property
    def rivals(self) -> Tensor:
        return torch.cat([self.images, torch.stack([self.mean, *self.class_means.values()])])

    @cached_property
    def gallery(self) -> Gallery:
        return Gallery(self.rivals)

    @cached_property
    def turning(self) -> Latest[Turning]:  # of a guess, rivals, and the usual ones
        return Latest(partial(Turning, self.gallery), 18)  # a victim's controls are its neighbors' guesses

    def nearest(self, original: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the public image nearest to ``original`` but not equal to it, and K public images almost equal to it.

        ``None`` if all public images equal ``original``.
        """
        places = ShiftedDescriptors(original[None], COARSE).rows(0, 0)[0]
        found = [(self.images, largest(places, self.gallery.standing(COARSE).rows(0, 0)[: len(self.images)]))]
        if self.more is not None:
            found.append((self.more, largest(places, self._more_rows)))
        best, itself = [], _as_bytes(original[None])
        for images, likeness in found:
            for place in likeness.topk(min(2, len(images))).indices.tolist():
                image = images[place].float() / (255 if images.dtype == torch.uint8 else 1)
                if not torch.equal(_as_bytes(image[None]), itself):
                    best.append((float(likeness[place]), image))
                    break
        if not best:
            return None
        alike = found[0][1].topk(min(ALIKE, len(self.images)))
        return max(best, key=lambda one: one[0])[1], self.images[alike.indices[alike.values >= SAME]]

    @cached_property
    def _more_rows(self) -> Tensor:
        assert self.more is not None
        return torch.cat([Descriptors(part.float() / 255, COARSE).rows(0, 0) for part in torch.split(self.more, 1000)])

    @cached_property
    def _places(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for place, image in enumerate(_as_bytes(self.images)):
            found.setdefault(image.numpy().tobytes(), []).append(place)
        return found

    def equal(self, originals: Tensor) -> Tensor:
        """Return booleans (N,), true for images that equal one of ``originals`` (B, C, H, W) in 8 bits."""
        found = torch.zeros(len(self.images), dtype=torch.bool)
        for original in _as_bytes(originals):
            found[self._places.get(original.numpy().tobytes(), [])] = True
        return found


def _as_bytes(images: Tensor) -> Tensor:
    return (255 * images.clamp(0, 1)).round().to(torch.uint8).flatten(1)


RIVALS = 10  # number of nearest candidates for the foreign share of a guess
LUCK = 0.3  # lead that luck adds with e = 2.7 times as many guesses, or with e times fewer candidates
LUCK_OF_MORE = LUCK * math.log(10)  # lead that luck adds for the further comparisons of turned guesses
ENOUGH = 1000  # number of candidates from which on a lead is not reduced
_CEILING = 0.9995  # correlation above which differences are rounding of pixels
TIE = 1e-3  # difference, in standard deviations of the candidates, that counts as rounding
_LEAST_SPREAD = 0.01  # least standard deviation of candidates, so that a blank guess is near none of them
_LEAST_REST = 1e-3  # least unexplained variance of two images' correlation that is not rounding


@dataclass(frozen=True, kw_only=True, eq=False)
class Identified:
    """Result of :func:`identify` for each of B originals: its best guess, its likeness to it, its rank and its lead."""

    guess: Tensor  # (B,) index of the most similar guess
    # (B,) largest absolute correlation with that guess, in [0, 1], over the comparisons in which the original leads;
    # without any, that of the best lead
    likeness: Tensor
    # (B,) rank of the original among itself and the candidates; 1 is nearest. ``None`` without candidates.
    rank: Tensor | None = None
    # (B,) largest lead over the nearest candidate, in standard deviations of the candidates, minus luck
    lead: Tensor | None = None
    # (B,) foreign share: largest partial correlation of the guess with a near candidate given the original, in [0, 1];
    # NaN if the original is not nearest
    foreign: Tensor | None = None
    candidates: int = 0  # number of candidates

    @property
    def figures(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("guess", "likeness", "rank", "lead", "foreign")}
        return {name: figure for name, figure in named.items() if figure is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """Comparison of guesses with originals and with rivals (other images that a guess could show) at one resolution."""

    guesses: Sequence[Turning]
    originals: Gallery
    rivals: Tensor  # (R,) indices of the rivals, sorted
    usual: Tensor  # (U,) indices that define the usual correlation
    sight: DescriptorScale

    def ranked(self, candidates: int) -> Identified:
        raw, own, rest = (each.flatten(0, 1) for each in self._strengths)
        leads = own - rest.amax(1, keepdim=True) - luck(len(self.guesses), candidates)
        lead, first = leads.max(0)
        place = torch.where(lead >= LEAD, raw.masked_fill(leads < LEAD, -1.0).argmax(0), first)
        rank = 1 + (rest[place] >= own.gather(0, place[None])[0][:, None] - TIE).sum(1)
        foreign = torch.full(rank.shape, math.nan)
        for b in (rank == 1).nonzero().flatten().tolist():
            foreign[b] = min(self._foreign(b, at) for at in {int(first[b]), int(place[b])})
        guess, likeness = place // self._strengths[1].shape[1], raw.gather(0, place[None])[0].clamp(0, 1)
        return Identified(guess=guess, likeness=likeness, rank=rank, lead=lead, foreign=foreign, candidates=candidates)

    def nearest(self, number: int) -> Tensor:
        best = self._strengths[2].flatten(0, 1).amax(0)
        return self.rivals[best.topk(min(number, len(best))).indices]

    def behind(self) -> Tensor:
        own, best = self._strengths[1].flatten(0, 1).amax(0), self._strengths[2].flatten(0, 1).amax(0)
        return (best[None] >= own[:, None] - TIE).sum(1)

    @cached_property
    def _strengths(self) -> tuple[Tensor, Tensor, Tensor]:
        # (G, W, B) raw, (G, W, B) and, of the rivals, (G, W, R) standardized; W: combinations of blurs and window
        every = torch.arange(len(self.originals.images))
        raw = [self._correlations(guess, self.originals, every) for guess in self.guesses]
        usual, key = torch.searchsorted(self.rivals, self.usual), (self.sight, self.rivals.numpy().tobytes())
        among = [
            g.once(key, lambda: relative(self._correlations(g, g.others, self.rivals), usual))  # noqa: B023
            for g in self.guesses
        ]
        own = [(_z(found) - mean) / spread for found, (_, mean, spread) in zip(raw, among, strict=True)]
        return torch.stack(raw), torch.stack(own), torch.stack([rest for rest, *_ in among])

    def _correlations(self, guess: Turning, images: Gallery, which: Tensor) -> Tensor:
        # (W, K): combinations of blurs and window, images
        found, few = [], 2 * len(which) < len(images.images)
        for of, to, window in self.sight.ways:
            rows = images.standing(self.sight).rows(to, window)
            found.append(largest(guess.shifted(self.sight).rows(of, window)[0], rows[which] if few else rows))
        return torch.stack(found) if few else torch.stack(found)[:, which]

    def _foreign(self, original: int, at: int) -> float:
        number, way = divmod(at, self._strengths[1].shape[1])
        near = self._strengths[2][number, way].topk(min(RIVALS, len(self.rivals))).indices
        of, to, window = list(self.sight.ways)[way]
        rows = self.guesses[number].shifted(self.sight).rows(of, window)[0]
        truth = gallery_of(self.originals.images[original][None]).standing(self.sight).rows(to, window)[0]
        shown = rows[int((rows @ truth).abs().argmax())]
        others = self.guesses[number].others.standing(self.sight)
        return shared_beyond(shown, truth, others.rows(to, window)[self.rivals[near]])


def best_of(ways: Sequence[Sequence[Way]], candidates: int) -> Identified:
    """Rank originals among candidates by their best comparison with any guess.

    ``ways``: comparisons of each guess; ``candidates``: number of distractors. Leads are reduced by ``LUCK_OF_MORE``,
    since the best of several comparisons leads by chance.
    """
    every = [(number, way) for number, own in enumerate(ways) for way in own]
    strengths = []
    for _, way in every:
        rest, mean, spread = relative(way.rest[None], way.usual)
        strengths.append(((_z(way.own[None]) - mean) / spread, rest))
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
    """Return the lead, in standard deviations, by which the best of several guesses beats candidates by chance.

    It is 0 for one guess and at least ``ENOUGH`` candidates, and larger for fewer candidates.
    """
    return LUCK * math.log(guesses * max(1.0, ENOUGH / max(1, candidates)))


def _z(correlations: Tensor) -> Tensor:
    return torch.atanh(correlations.clamp(max=_CEILING))


def relative(rest: Tensor, usual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Standardize Fisher's z of correlations (W, R) in each row; return it, and the rows' mean and spread (W, 1).

    W: comparisons; R: rivals of an original. ``usual`` (U,): indices of the columns that define mean and spread.
    """
    z = _z(rest)
    typical = z[:, usual]
    mean, spread = typical.mean(1, keepdim=True), typical.std(1, keepdim=True, unbiased=False) + _LEAST_SPREAD
    return (z - mean) / spread, mean, spread


def shared_beyond(shown: Tensor, truth: Tensor, rivals: Tensor) -> float:
    """Return the largest partial correlation of ``shown`` with any of K ``rivals`` (K, D), given ``truth``."""
    of_truth, of_rivals, between = shown @ truth, rivals @ shown, rivals @ truth
    rest = ((1 - of_truth**2).clamp_min(_LEAST_REST) * (1 - between**2).clamp_min(_LEAST_REST)).sqrt()
    return float(((of_rivals - of_truth * between) / rest).abs().amax().clamp(0, 1))


REFERENCE = 200  # number of candidates whose correlations define mean and spread
USUAL_TURNED = 100  # ``REFERENCE`` for turned guesses


def identify(
    guesses: Tensor, originals: Tensor, candidates: PublicImages | None = None, *, apart: Tensor | None = None
) -> Identified:
    """Rank each original of a batch among candidates by its similarity to the guesses, ignoring harmless changes.

    Candidates are the distractors (images that a guess could also show), their mean and that of each class. Similarity
    is Fisher's z of the correlation, standardized over ``REFERENCE`` candidates. An original has rank 1 if it is the
    most similar in at least one comparison with a guess. ``UserError`` for candidates of another shape.

    Harmless changes are the negative and other changes of brightness and contrast, shifts by up to a tenth of the
    width, mirrors, quarter turns, rotation by up to 15 degrees, a crop of 70 % or more, a frame, blur, coarse pixels,
    the loss of one half, shuffled tiles, and order within the batch.

    Args:
        guesses: guesses (G, C, H, W) in [0, 1] of any of the originals.
        originals: images (B, C, H, W) in [0, 1].
        candidates: distractors; those equal to one of ``originals`` are left out.
        apart: further images (A, C, H, W) to leave out of the candidates.
    """
    others = _expect_alike(candidates, originals)
    if others is None:
        return _likeness(guesses, originals)
    left = ~others.equal(originals if apart is None else torch.cat([originals, apart]))
    if not bool(left.any()):
        return _likeness(guesses, originals)
    images = left.nonzero().flatten()
    rivals = torch.cat([images, torch.arange(len(left), len(others.rivals))])
    usual = images[torch.linspace(0, len(images) - 1, min(REFERENCE, len(images))).long()]
    few = usual[:: REFERENCE // USUAL_TURNED].contiguous()
    turnings = [others.turning(guess, rivals, few) for guess in torch.split(guesses, 1)]
    coarse = Look(guesses=turnings, originals=gallery_of(originals), rivals=rivals, usual=usual, sight=COARSE)
    found = coarse.ranked(len(images))
    settled = (found.figures["lead"] >= SURE) | (coarse.behind() > HOPELESS * len(images))
    if not bool(settled.all()):
        chosen = torch.tensor(sorted({*usual.tolist(), *coarse.nearest(NEAREST).tolist()}))
        closer = replace(coarse, rivals=chosen, sight=FINE).ranked(len(images)).figures
        either = {name: torch.where(settled, figure, closer[name]) for name, figure in found.figures.items()}
        found = Identified(**either, candidates=len(images))
    return _turned(found, coarse, len(images))


def _turned(found: Identified, look: Look, candidates: int) -> Identified:
    doubtful = (found.figures["lead"] < SURE).nonzero().flatten()
    images = look.originals.images
    if not len(doubtful) or min(images.shape[-2:]) < LEAST_SIDE:
        return found
    gallery = look.originals if len(doubtful) == len(images) else gallery_of(images[doubtful])
    ways = [each.ways(gallery) for each in look.guesses]
    turned = best_of(ways, candidates)
    if bool((turned.figures["lead"] < SURE).any()):
        ways = [[*own, *(near for way in own if (near := way.closer()) is not None)] for own in ways]
        turned = best_of(ways, candidates)
    one, other = {name: figure[doubtful] for name, figure in found.figures.items()}, turned.figures
    best = {name: torch.where(one["lead"] >= other["lead"], one[name], other[name]) for name in one}
    both = torch.minimum(one["lead"], other["lead"]) >= LEAD
    best["likeness"] = torch.where(both, torch.maximum(one["likeness"], other["likeness"]), best["likeness"])
    best["foreign"] = torch.where(both, torch.fmin(one["foreign"], other["foreign"]), best["foreign"])
    figures = {name: figure.index_copy(0, doubtful, best[name]) for name, figure in found.figures.items()}
    return Identified(**figures, candidates=candidates)


def _likeness(guesses: Tensor, originals: Tensor) -> Identified:
    still = Descriptors(originals, FINE)
    found = []
    for guess in torch.split(guesses, 1):
        seen = ShiftedDescriptors(guess, FINE)
        found.append(torch.stack([largest(seen.rows(of, w)[0], still.rows(to, w)) for of, to, w in FINE.ways]).amax(0))
    best, guess = torch.stack(found).max(0)
    return Identified(guess=guess, likeness=best.clamp(0, 1))


def _expect_alike(candidates: PublicImages | None, originals: Tensor) -> PublicImages | None:
    if candidates is None or not len(candidates.images):
        return None
    if candidates.images.shape[1:] != originals.shape[1:]:
        raise UserError(
            f"Candidates are expected to have the originals' shape {tuple(originals.shape[1:])}, but got"
            f" {tuple(candidates.images.shape[1:])}; cut or scale them first."
        )
    return candidates


_SIGHT, _FAR = replace(FINE, between=False), replace(COARSE, between=False)
_NONE = -math.inf, -math.inf  # PSNR and SSIM without a guess


def aligned(guess: Tensor, original: Tensor) -> tuple[float, float]:
    """Return the largest PSNR in dB and SSIM of ``guess`` to ``original``, (C, H, W) in [0, 1], after harmless changes.

    The guess is mirrored or shifted, and each channel's brightness and contrast are fitted to the original's.
    """
    return all_aligned([[guess]], original[None])[0]


def all_aligned(guesses: Sequence[Sequence[Tensor]], originals: Tensor) -> list[tuple[float, float]]:
    """Return PSNR and SSIM, see :func:`aligned`, of each original's best guess; -inf for an original without one."""
    pairs = [(guess, original) for own, original in zip(guesses, originals, strict=True) for guess in own]
    if not pairs:
        return [_NONE] * len(originals)
    # fit ``a * guess + b`` to the original in each channel, clamped to [0, 1]
    changed = torch.stack([torch.stack([guess, guess.flip(-1), _best_place(guess, to)]) for guess, to in pairs])
    truths = torch.stack([original for _, original in pairs])[:, None]
    x, y = changed.flatten(3).double(), truths.flatten(3).double()
    dx, dy = x - x.mean(3, keepdim=True), y - y.mean(3, keepdim=True)
    slope = (dx * dy).sum(3, keepdim=True) / dx.square().sum(3, keepdim=True).clamp_min(1e-9)
    fitted = (y.mean(3, keepdim=True) + slope * dx).clamp(0, 1).view_as(changed).to(truths.dtype)
    tried = torch.cat([changed[:, :1], fitted], 1)
    both = tried.flatten(0, 1), truths.expand_as(tried).flatten(0, 1)
    best = zip(*(each(*both).view(len(pairs), -1).amax(1).tolist() for each in (psnr, ssim)), strict=True)
    return [_larger([_NONE, *islice(best, len(own))]) for own in guesses]


def control(
    original: Tensor, label: int | None, candidates: PublicImages | None, extra: Sequence[Tensor] = ()
) -> tuple[float, float]:
    """Return the largest PSNR in dB and SSIM to ``original`` that guesses made without the update reach.

    These are the original's mean color; the mean of ``candidates``, that of class ``label`` and the nearest public
    image; and ``extra`` (C, H, W), such as the same attack's guesses at another client. See :func:`aligned`.
    """
    kept: dict[tuple[bytes, int | None], tuple[float, float]] = {} if candidates is None else candidates.controls
    if (key := (original.numpy().tobytes(), label)) not in kept:
        own_color = original.mean((1, 2), keepdim=True).expand_as(original)
        found = float(psnr(own_color[None], original[None])), float(ssim(own_color[None], original[None]))
        kept[key] = _larger([found, *all_aligned([list(_public(original, label, candidates))], original[None])])
    return _larger([kept[key], *all_aligned([extra], original[None])])


def _larger(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    best_psnr, best_ssim = (max(values) for values in zip(*pairs, strict=True))
    return best_psnr, best_ssim


def _public(original: Tensor, label: int | None, candidates: PublicImages | None) -> Iterator[Tensor]:
    if candidates is None:
        return
    yield candidates.mean
    if label in candidates.class_means:
        yield candidates.class_means[label]
    nearest = candidates.nearest(original) if candidates.images.shape[1:] == original.shape else None
    if nearest is not None:
        yield nearest[0]


def near_lead(original: Tensor, candidates: PublicImages) -> tuple[float, float]:
    """Return lead and likeness (:class:`Identified`) of the public image nearest to ``original``, taken as a guess.

    They are -inf and 0 if there is no such image, or if it resembles another candidate more than ``original``.
    """
    key = original.numpy().tobytes()
    if key not in candidates.near:
        candidates.near[key] = -math.inf, 0.0
        if (nearest := candidates.nearest(original)) is not None:
            apart = torch.cat([nearest[0][None], nearest[1]])
            found = identify(nearest[0][None], original[None], candidates, apart=apart)
            if found.rank is not None and found.rank == 1:
                candidates.near[key] = float(found.figures["lead"]), float(found.likeness)
    return candidates.near[key]


def laid_otherwise(image: Tensor) -> list[Tensor]:
    """Return ``image`` (C, H, W), its vertical flip and, if it is square, the transposes of both."""
    return [image, image.flip(-2), *((image.mT, image.mT.flip(-2)) if image.shape[-2] == image.shape[-1] else ())]


@partial(Latest, most=24)  # a guess is a control of several originals
def _laid(guess: Tensor) -> tuple[ShiftedDescriptors, list[ShiftedDescriptors]]:
    every = laid_otherwise(guess)
    return ShiftedDescriptors(torch.stack(every), _FAR), [ShiftedDescriptors(each[None], _SIGHT) for each in every]


def _best_place(guess: Tensor, original: Tensor) -> Tensor:
    """Return ``guess`` (C, H, W) mirrored, turned and shifted for the best correlation with ``original``."""
    truth = gallery_of(original[None])
    coarse, still = truth.standing(_FAR).rows(0, 0), truth.standing(_SIGHT).rows(0, 0)[0]
    far, closer = _laid(guess)
    chosen = closer[int(largest(far.rows(0, 0), coarse).argmax())]
    guess, places = chosen.images[0], chosen.rows(0, 0)[0]
    height, width = small(original[None], _SIGHT.side).shape[-2:]
    edge_y, edge_x = shift_reach(height), shift_reach(width)
    across, down = 2 * edge_x + 1, 2 * edge_y + 1
    mirrored, place = divmod(int((places @ still).abs().argmax()) % (2 * down * across), down * across)
    row, column = divmod(place, across)
    lower = round((edge_y - row) * original.shape[-2] / height)
    right = round((edge_x - column) * original.shape[-1] / width)
    guess = guess.flip(-1) if mirrored else guess
    edges = max(right, 0), max(-right, 0), max(lower, 0), max(-lower, 0)
    padded = functional.pad(guess[None], edges, "replicate")[0]
    return padded[:, max(-lower, 0) :, max(-right, 0) :][:, : guess.shape[-2], : guess.shape[-1]]
