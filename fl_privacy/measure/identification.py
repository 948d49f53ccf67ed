"""Identify a guess's original among candidates that no attack saw, up to harmless changes."""

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
"""Candidates whose correlations define the usual one."""

NEAREST = 60
"""Candidates compared finely: those nearest to the guesses at low resolution."""

USUAL_TURNED = 100
"""The same as ``REFERENCE``, for turned guesses."""

HOPELESS = 0.1
"""Share of candidates nearer at low resolution, above which no finer comparison is made."""


def identify(
    guesses: Tensor, originals: Tensor, candidates: PublicImages | None = None, *, apart: Tensor | None = None
) -> Identified:
    """Compare the guesses at a batch with its originals and with ``candidates``, up to harmless changes.

    Harmless are the negative and other changes of brightness and contrast, shifts by up to a tenth of the width,
    mirrors, quarter turns, rotation by up to 15 degrees, a crop of 70 % or more, a frame, blur, coarse pixels, the loss
    of one half, shuffled tiles, and order within the batch. The strength of an image is Fisher's z of its best
    correlation relative to mean and spread over ``REFERENCE`` candidates; the original must lead in one way
    (``measure.descriptors``, ``turning``). Candidates include their mean and that of each class.

    Args:
        guesses: (G, C, H, W) in [0, 1], at a batch.
        originals: (B, C, H, W) in [0, 1].
        candidates: distractors; those equal to one of ``originals`` are left out.
        apart: (A, C, H, W) further images to leave out.

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
    """Return the largest PSNR in dB and SSIM of a guess over harmless changes.

    These are none, and a least-squares change of each channel's intensity of the guess, its mirror image, or the mirror
    image and quarter turn shifted to its best correlation.

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
    """Return the largest PSNR in dB and SSIM of guesses that never saw the update, under the same changes.

    Args:
        original: (C, H, W) in [0, 1].
        label: class; ``None`` if not known.
        candidates: public images, whose mean, class mean and nearest are tried; without any, the original's mean color.
        extra: (C, H, W) further guesses without the update, such as the same attack on another client.
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
    """Return lead and likeness of the public image nearest to ``original`` (C, H, W), as a guess at it."""
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
    """Return ``image`` (C, H, W), upside down and, if square, in quarter turns; ``Moved`` adds the mirror images."""
    square = image.shape[-2] == image.shape[-1]
    return [image, image.flip(-2), *((image.mT, image.mT.flip(-2)) if square else ())]


def _best_place(guess: Tensor, original: Tensor) -> Tensor:
    """Mirror, turn and shift ``guess`` (C, H, W) for the best correlation with ``original``."""
    coarse = Standing(original[None], _FAR).rows(0, 0)
    guess = max(laid_otherwise(guess), key=lambda each: float(largest(Moved(each[None], _FAR).rows(0, 0), coarse)))
    places, still = Moved(guess[None], _SIGHT).rows(0, 0), Standing(original[None], _SIGHT).rows(0, 0)[0]
    height, width = small(original[None], _SIGHT.side).shape[-2:]
    edge_y, edge_x = shift_reach(height), shift_reach(width)
    across, down = 2 * edge_x + 1, 2 * edge_y + 1
    best = int((places @ still).abs().argmax()) % (2 * down * across)
    mirrored, place = divmod(best, down * across)
    row, column = divmod(place, across)
    lower = round((edge_y - row) * original.shape[-2] / height)
    right = round((edge_x - column) * original.shape[-1] / width)
    guess = guess.flip(-1) if mirrored else guess
    edges = max(right, 0), max(-right, 0), max(lower, 0), max(-lower, 0)
    padded = functional.pad(guess[None], edges, "replicate")[0]
    return padded[:, max(-lower, 0) :, max(-right, 0) :][:, : guess.shape[-2], : guess.shape[-1]]
