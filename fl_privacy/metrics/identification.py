"""Whether a guess shows which image it was made of: the original among candidates that no attack saw."""

from dataclasses import replace

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.metrics.comparison import Identified, Look, largest
from fl_privacy.metrics.looks import COARSE, FINE, Moved, Standing
from fl_privacy.metrics.outcome import SURE
from fl_privacy.metrics.public_images import PublicImages

REFERENCE = 200
"""Candidates by whose correlations it is judged what is usual."""

NEAREST = 60
"""Candidates looked at closely: those nearest to the guesses at a coarse look."""

HOPELESS = 0.1
"""Share of the candidates that are nearer at a coarse look, from which on no closer look is taken."""


def identify(
    guesses: Tensor, originals: Tensor, candidates: PublicImages | None = None, *, scaled: bool = False
) -> Identified:
    """Compare the guesses at a batch with its originals and with ``candidates``, up to harmless changes.

    These are the negative and any other change of brightness and contrast, a shift by up to a tenth of the width, the
    mirror image, blur, the loss of one half, and the order within the batch. A guess and another image are compared in
    several ways (``fl_privacy.metrics.looks``), in each of which candidates get the same tries as the original: of all
    changes, the best for each counts. The strength of an image is Fisher's z of its correlation relative to mean and
    spread over ``REFERENCE`` candidates; the original has to lead in one way. Among the candidates are their mean and
    that of each of their classes, so that a guess that shows what a class has in common is nearer to that.

    Everything is looked at coarsely first. Where that leaves in doubt which is nearest, the original and the nearest
    candidates are looked at closely; what was far at the first look stays behind them.

    Args:
        guesses: (G, C, H, W) in [0, 1], at a batch.
        originals: (B, C, H, W) in [0, 1].
        candidates: what else a guess could be of; those that are one of ``originals`` are left out.
        scaled: also scale and rotate, where the model may have seen another cut of the originals.

    Raises:
        UserError: candidates have another shape.
    """
    others = _expect_alike(candidates, originals)
    if others is None or not bool((left := ~others.equal(originals)).any()):
        return _likeness(guesses, originals)
    images = left.nonzero().flatten()
    means = torch.arange(len(left), len(others.rivals))
    usual = images[torch.linspace(0, len(images) - 1, min(REFERENCE, len(images))).long()]
    coarse = Look(
        guesses=guesses,
        originals=originals,
        others=others,
        rivals=torch.cat([images, means]),
        usual=usual,
        sight=COARSE,
        scaled=scaled,
    )
    found = coarse.ranked(len(images))
    assert found.lead is not None
    settled = (found.lead >= SURE) | (coarse.behind() > HOPELESS * len(images))
    if bool(settled.all()):
        return found
    chosen = torch.tensor(sorted({*usual.tolist(), *coarse.nearest(NEAREST).tolist()}))
    closer = replace(coarse, rivals=chosen, sight=FINE, turns=coarse.best_turns).ranked(len(images))
    either = {each: torch.where(settled, getattr(found, each), getattr(closer, each)) for each in _FIGURES}
    return Identified(**either, candidates=len(images))


_FIGURES = ("guess", "likeness", "rank", "lead", "foreign")


def _likeness(guesses: Tensor, originals: Tensor) -> Identified:
    """Without candidates."""
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
