"""Whether a guess shows which image it was made of: the original among candidates that no attack saw.

A guess laid on its original by the best harmless change, and what a guess without any update reaches so.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fl_privacy.errors import UserError
from fl_privacy.measure.comparison import Identified, Look, best_of
from fl_privacy.measure.descriptors import COARSE, FINE, Moved, Standing, largest, shift_reach, small
from fl_privacy.measure.images import psnr, ssim
from fl_privacy.measure.outcome import LEAD, SURE
from fl_privacy.measure.public_images import PublicImages
from fl_privacy.measure.turning import LEAST_SIDE, Gallery, Turning

REFERENCE = 200
"""Candidates by whose correlations it is judged what is usual."""

NEAREST = 60
"""Candidates looked at closely: those nearest to the guesses at a coarse look."""

USUAL_TURNED = 100
"""The same, of guesses that are turned."""

HOPELESS = 0.1
"""Share of the candidates that are nearer at a coarse look, from which on no closer look is taken."""


def identify(
    guesses: Tensor, originals: Tensor, candidates: PublicImages | None = None, *, apart: Tensor | None = None
) -> Identified:
    """Compare the guesses at a batch with its originals and with ``candidates``, up to harmless changes.

    These are the negative and any other change of brightness and contrast, a shift by up to a tenth of the width,
    mirrors and quarter turns, rotation by up to 15 degrees, a cut of 70 % or more, a frame, blur, coarse pixels, the
    loss of one half, another order of tiles, and the order within the batch. A guess and another image are compared in
    several ways (``measure.descriptors``, ``turning``), in each of which candidates get the same tries as the
    original: of all changes, the best for each counts. The strength of an image is Fisher's z of its correlation
    relative to mean and spread over ``REFERENCE`` candidates; the original has to lead in one way. Among the candidates
    are their mean and that of each of their classes, so that a guess that shows what a class has in common is nearer to
    that.

    Everything is looked at coarsely first. Where that leaves in doubt which is nearest, the original and the nearest
    candidates are looked at closely; what was far at the first look stays behind them. Where no original is surely
    found so, guesses are also turned, cut and taken to pieces.

    Args:
        guesses: (G, C, H, W) in [0, 1], at a batch.
        originals: (B, C, H, W) in [0, 1].
        candidates: what else a guess could be of; those that are one of ``originals`` are left out.
        apart: (A, C, H, W) others that are left out.

    Raises:
        UserError: candidates have another shape.
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
    coarse = Look(
        guesses=guesses, originals=originals, others=others, rivals=rivals, usual=usual, sight=COARSE
    )  # fmt: skip
    found = coarse.ranked(len(images))
    settled = (found.figures["lead"] >= SURE) | (coarse.behind() > HOPELESS * len(images))
    if not bool(settled.all()):
        chosen = torch.tensor(sorted({*usual.tolist(), *coarse.nearest(NEAREST).tolist()}))
        closer = replace(coarse, rivals=chosen, sight=FINE).ranked(len(images)).figures
        either = {name: torch.where(settled, figure, closer[name]) for name, figure in found.figures.items()}
        found = Identified(**either, candidates=len(images))
    return _turned(found, coarse, len(images))


def _turned(found: Identified, look: Look, candidates: int) -> Identified:
    """Also turn, cut and take to pieces the guesses, for originals that were not surely ``found``."""
    doubtful = (found.figures["lead"] < SURE).nonzero().flatten()
    if not len(doubtful) or min(look.originals.shape[-2:]) < LEAST_SIDE:
        return found
    gallery, usual = Gallery(look.originals[doubtful]), look.usual[:: REFERENCE // USUAL_TURNED].contiguous()
    ways = [
        Turning(guess=guess, originals=gallery, others=look.others.gallery, rivals=look.rivals, usual=usual).ways()
        for guess in torch.split(look.guesses, 1)
    ]
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
    still = Standing(originals, FINE)
    found = []
    for guess in torch.split(guesses, 1):
        seen = Moved(guess, FINE)
        found.append(torch.stack([largest(seen.rows(of, w), still.rows(to, w)) for of, to, w in FINE.ways]).amax(0))
    best, guess = torch.stack(found).max(0)
    return Identified(guess=guess, likeness=best.clamp(0, 1))


def _expect_alike(candidates: PublicImages | None, originals: Tensor) -> PublicImages | None:
    if candidates is None or not len(candidates.images):
        return None
    if candidates.images.shape[1:] != originals.shape[1:]:
        raise UserError(
            f"Candidates of shape {tuple(originals.shape[1:])} are expected, as the originals, but got"
            f" {tuple(candidates.images.shape[1:])}; cut or scale them first."
        )
    return candidates


_SIGHT, _FAR = replace(FINE, between=False), replace(COARSE, between=False)


def aligned(guess: Tensor, original: Tensor) -> tuple[float, float]:
    """Return the largest PSNR in decibel and SSIM of a guess over harmless changes.

    These are none, and a linear change of each channel's intensity (least squares) of the guess as it is, mirrored, and
    mirrored, turned by quarters or neither, at the shift where it correlates best with the original.

    Args:
        guess: (C, H, W) in [0, 1].
        original: (C, H, W) in [0, 1].
    """
    tries = [guess]
    for change in (guess, guess.flip(-1), _best_place(guess, original)):
        # fit ``a * guess + b`` to ``original`` in each channel, clamped to [0, 1]
        x, y = change.flatten(1).double(), original.flatten(1).double()
        dx, dy = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
        slope = (dx * dy).sum(1, keepdim=True) / dx.square().sum(1, keepdim=True).clamp_min(1e-9)
        fitted = (y.mean(1, keepdim=True) + slope * dx).clamp(0, 1).view_as(original).to(original.dtype)
        tries.append(fitted)
    changed = torch.stack(tries)
    truth = original.expand_as(changed)
    return float(psnr(changed, truth).max()), float(ssim(changed, truth).max())


def control(
    original: Tensor, label: int | None, candidates: PublicImages | None, extra: Sequence[Tensor] = ()
) -> tuple[float, float]:
    """Return the largest PSNR in decibel and SSIM of guesses that never saw the update, under the same changes.

    Args:
        original: (C, H, W) in [0, 1].
        label: its class; ``None`` where nobody knows it.
        candidates: public images, whose mean and mean of the class are tried, and the one nearest to the original;
            without, the image's mean color alone.
        extra: (C, H, W) further guesses without the update, such as the same attack on another client's.
    """
    key = original.numpy().tobytes(), label
    if candidates is not None and not len(extra) and key in candidates.controls:
        return candidates.controls[key]
    own_color = original.mean((1, 2), keepdim=True).expand_as(original)
    found = [(float(psnr(own_color[None], original[None])), float(ssim(own_color[None], original[None])))]
    found += [aligned(guess, original) for guess in [*_public(original, label, candidates), *extra]]
    best_psnr, best_ssim = (max(values) for values in zip(*found, strict=True))
    if candidates is not None and not len(extra):
        candidates.controls[key] = best_psnr, best_ssim
    return best_psnr, best_ssim


def _public(original: Tensor, label: int | None, candidates: PublicImages | None) -> Iterator[Tensor]:
    if candidates is None:
        return
    yield candidates.mean
    of_class = None if label is None else candidates.class_mean(label)
    if of_class is not None:
        yield of_class
    nearest = candidates.nearest(original) if candidates.images.shape[1:] == original.shape else None
    if nearest is not None:
        yield nearest[0]


def near_lead(original: Tensor, candidates: PublicImages) -> tuple[float, float]:
    """Return lead and likeness of the public image that is nearest to ``original`` (C, H, W), as a guess at it."""
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
    """Return ``image`` (C, H, W) and how else it may lie: upside down and, if square, turned by quarters.

    Each stands for its mirror image as well, which ``Moved`` makes.
    """
    square = image.shape[-2] == image.shape[-1]
    return [image, image.flip(-2), *((image.mT, image.mT.flip(-2)) if square else ())]


def _best_place(guess: Tensor, original: Tensor) -> Tensor:
    """Mirror and turn ``guess`` (C, H, W) or not, and shift it to where it correlates best with ``original``."""
    coarse = Standing(original[None], _FAR).rows(0, 0)
    guess = max(laid_otherwise(guess), key=lambda each: float(largest(Moved(each[None], _FAR).rows(0, 0), coarse)))
    places, still = Moved(guess[None], _SIGHT).rows(0, 0), Standing(original[None], _SIGHT).rows(0, 0)[0]
    height, width = small(original[None], _SIGHT.side).shape[-2:]
    edge_y, edge_x = shift_reach(height), shift_reach(width)
    across, down = 2 * edge_x + 1, 2 * edge_y + 1
    best = int((places @ still).abs().argmax()) % (2 * down * across)
    mirrored, place = divmod(best, down * across)
    row, column = divmod(place, across)
    down_by = round((edge_y - row) * original.shape[-2] / height)
    right_by = round((edge_x - column) * original.shape[-1] / width)
    return _shifted(guess.flip(-1) if mirrored else guess, down_by, right_by)


def _shifted(image: Tensor, down: int, right: int) -> Tensor:
    """Move an image (C, H, W) by ``down`` and ``right`` pixels, its edge repeated."""
    height, width = image.shape[-2:]
    edges = max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)
    padded = functional.pad(image[None], edges, "replicate")[0]
    return padded[:, max(-down, 0) :, max(-right, 0) :][:, :height, :width]
