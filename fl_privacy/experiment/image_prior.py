"""What an attack's generator of images was trained on: said in every report, and never the victims."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.attacks.attack import trained_on
from fl_privacy.errors import UserError

LOOKED_AT = 1000
"""Images of those that victims come from, at equal distances."""

MOST_SEEN = 10.0
"""Percent of them that a generator may have seen: data sets hold a few images twice, in one split and in another."""


def describe_image_prior(
    attack: ReconstructionAttack | None, image: Sequence[int], victims: Tensor | None
) -> list[str]:
    """A sentence on the generator of ``attack``; none where it has no generator.

    Args:
        attack: what is run.
        image: (C, H, W).
        victims: (N, C, H, W) images that those attacked are among, uint8 or in [0, 1]; ``None`` where they are unknown.

    Raises:
        UserError: there is no generator of such images, or it was trained on these.
    """
    known = None if attack is None else trained_on(attack, image)
    if known is None:
        return []
    said = f"The attacker looks among the images of a generator that was trained on {known.words()}"
    if not len(known.fingerprints) or victims is None:
        return [f"{said}; whether a victim's image was among these is not checked."]
    chosen = torch.arange(len(victims))[:: max(1, len(victims) // LOOKED_AT)]
    share = 100 * float(known.seen(victims[chosen]).double().mean())
    if share > MOST_SEEN:
        raise UserError(
            f"attack.generator is expected not to have seen the victims, but it was trained on {known.words()}, with"
            f" {share:.0f} % of the images that they come from; attack another split, or train one on other images"
            " (fl-privacy train-generator split=test)."
        )
    return [f"{said}; {share:.1f} % of the images that victims are taken from were among them."]
