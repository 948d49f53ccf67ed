"""Whether a guess shows which image it was made of: the original among candidates that no attack saw."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.metrics.looks import Looks, correlations, moved, standing

CLASS_IMAGES = 8
"""Public images of the original's class whose lead is looked at."""

_CEILING = 0.9995
"""Correlations beyond are the same, to rounding of pixels."""

_TIE = 1e-3
"""Difference in spreads of the candidates that is rounding."""

_LEAST_SPREAD = 0.01
"""Of candidates, so that a guess in which there is nothing to see is near to none of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicImages:
    """Images that an original has to be told apart from, none of them attacked.

    Attributes:
        images: (N, C, H, W) in [0, 1].
        labels: (N,) their classes; ``None`` where nobody knows them.
        name: what they are, a short phrase.
    """

    images: Tensor
    labels: Tensor | None = None
    name: str = "public images"
    _looks: dict[bool, Looks] = field(default_factory=dict, init=False, repr=False)

    def looks(self, *, coarse: bool) -> Looks:
        """Rows to compare with, made when they are first asked for."""
        if coarse not in self._looks:
            self._looks[coarse] = standing(self.images, coarse=coarse)
        return self._looks[coarse]

    @cached_property
    def mean(self) -> Tensor:
        """(C, H, W) of all."""
        return self.images.mean(0)

    def class_mean(self, label: int) -> Tensor | None:
        """(C, H, W) of a class; ``None`` where none is of it or nobody knows."""
        if self.labels is None or not bool((self.labels == label).any()):
            return None
        return self.images[self.labels == label].mean(0)

    @cached_property
    def _bytes(self) -> Tensor:
        return _as_bytes(self.images)

    def equal(self, originals: Tensor) -> Tensor:
        """(N,) whether a candidate is one of ``originals`` (B, C, H, W) to the rounding of pixels."""
        found = torch.zeros(len(self.images), dtype=torch.bool)
        for original in _as_bytes(originals):
            found |= (self._bytes == original).all(1)
        return found


def lead_of_class(
    original: Tensor, label: int, candidates: PublicImages, *, coarse: bool = False, most: int = CLASS_IMAGES
) -> float | None:
    """Largest lead that public images of a class have as guesses at an original (C, H, W) that they do not show.

    Tried are the mean of the class and its first images, at most ``most``. ``None`` where there are none.
    """
    mean = candidates.class_mean(label)
    if mean is None or candidates.labels is None:
        return None
    own = candidates.images[candidates.labels == label][:most]
    found = [
        identify(guess[None], original[None], candidates, coarse=coarse, left_out=guess[None]) for guess in (mean, *own)
    ]
    return max(float(each.lead) for each in found if each.lead is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Identified:
    """How each original of a batch of B compares with the guesses at the batch.

    Attributes:
        guess: (B,) index of the guess that is most like it.
        likeness: (B,) largest absolute correlation with that guess over all harmless changes, in [0, 1].
        rank: (B,) its place among itself and the candidates, by how far it is from what is usual; 1 is the nearest.
            ``None`` without candidates.
        lead: (B,) how far ahead of the nearest candidate, in standard deviations of the candidates; negative where a
            candidate is nearer.
        candidates: how many there were.
    """

    guess: Tensor
    likeness: Tensor
    rank: Tensor | None
    lead: Tensor | None
    candidates: int


def identify(
    guesses: Tensor,
    originals: Tensor,
    candidates: PublicImages | None = None,
    *,
    coarse: bool = False,
    left_out: Tensor | None = None,
) -> Identified:
    """Compare the guesses at a batch with its originals and with ``candidates``, up to harmless changes.

    These are the negative and any other change of brightness and contrast, a shift by up to a tenth of the width, the
    mirror image, blur, the loss of one half, and the order within the batch. A guess and another image are compared in
    several ways (``fl_privacy.metrics.looks``); in each, Fisher's z of the correlation is taken relative to mean and
    spread over originals and candidates, and the largest counts. Candidates get the same tries as originals: the best
    guess of the batch, the best way to compare and the best change count for both.

    Args:
        guesses: (G, C, H, W) in [0, 1], at a batch.
        originals: (B, C, H, W) in [0, 1].
        candidates: what else a guess could be of; those that are one of ``originals`` are left out.
        coarse: also scale and rotate, where the model may have seen another cut of the originals.
        left_out: (M, C, H, W) further images that are no candidates.

    Raises:
        UserError: candidates have another shape.
    """
    others = _expect_alike(candidates, originals)
    looks = standing(originals, coarse=coarse)
    keep = (
        None if others is None else ~others.equal(originals if left_out is None else torch.cat([originals, left_out]))
    )
    likeness, strength, rivals = [], [], []
    for guess in torch.split(guesses, 1):
        seen = moved(guess, coarse=coarse)
        raw = torch.stack(list(correlations(seen, looks)))
        if others is not None and keep is not None:
            rival = torch.stack(list(correlations(seen, others.looks(coarse=coarse))))[:, keep]
            own, rest = _relative(raw, rival)
            strength.append(own)
            rivals.append(rest)
        likeness.append(raw)
    raw = torch.stack(likeness)  # (G, ways, B)
    if not strength:
        best = raw.amax(1)
        return Identified(guess=best.argmax(0), likeness=best.amax(0).clamp(0, 1), rank=None, lead=None, candidates=0)
    own, rest = torch.stack(strength), torch.stack(rivals).amax(0)  # (G, ways, B), (ways, N)
    return _ranked(raw, own, rest.amax(0))


def _ranked(raw: Tensor, own: Tensor, rest: Tensor) -> Identified:
    """Of correlations and strengths (G, ways, B), and the strengths (N,) of candidates."""
    ways = own.shape[1]
    best, place = own.flatten(0, 1).max(0)
    likeness = raw.flatten(0, 1).gather(0, place[None])[0]
    return Identified(
        guess=place // ways,
        likeness=likeness.clamp(0, 1),
        rank=1 + (rest[None] >= best[:, None] - _TIE).sum(1),
        lead=best - rest.max() if len(rest) else torch.zeros_like(best),
        candidates=len(rest),
    )


def _relative(own: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Correlations (ways, B) and (ways, N) -> Fisher's z relative to what is usual of that guess in that way."""
    z_own, z_rest = (torch.atanh(found.clamp(max=_CEILING)) for found in (own, rest))
    every = torch.cat([z_own, z_rest], dim=1)
    mean, spread = every.mean(1, keepdim=True), every.std(1, keepdim=True, unbiased=False) + _LEAST_SPREAD
    return (z_own - mean) / spread, (z_rest - mean) / spread


def _as_bytes(images: Tensor) -> Tensor:
    return (255 * images.clamp(0, 1)).round().to(torch.uint8).flatten(1)


def _expect_alike(candidates: PublicImages | None, originals: Tensor) -> PublicImages | None:
    if candidates is None or not len(candidates.images):
        return None
    if candidates.images.shape[1:] != originals.shape[1:]:
        raise UserError(
            f"Candidates of shape {tuple(originals.shape[1:])} are expected, as the originals, but got"
            f" {tuple(candidates.images.shape[1:])}; cut or scale them first."
        )
    return candidates
