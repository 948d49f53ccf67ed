"""Uploading only some elements (PPDL)."""

from typing import Literal

import torch

from fl_privacy.defenses.base import ClientState, Defense
from fl_privacy.defenses.checks import expect_number, expect_one_of
from fl_privacy.defenses.clipping import Scope
from fl_privacy.defenses.feedback import compress_with_feedback
from fl_privacy.defenses.noise import Distribution, noise_std, sample_noise
from fl_privacy.defenses.selection import keep_largest, random_scores
from fl_privacy.types import Tensors


def selective_sharing(
    *,
    share: float = 0.05,
    by: Literal["magnitude", "random"] = "magnitude",
    scope: Scope = "global",
    noise: Distribution = "gaussian",
    noise_scale: float = 0.0,
    error_feedback: bool = False,
) -> Defense:
    """Share ceil(share * n) elements, the largest or random ones, noised; the others are zero.

    PPDL of Shokri and Shmatikov 2015, as the SPN paper compares with it (Table 11 for the noise).
    ``encoding.encode`` sends positions and values of the shared elements only.

    Args:
        share: theta, in (0, 1].
        by: which elements are shared.
        scope: ``global`` takes the share of the whole update, ``layer`` of each parameter tensor.
        noise: distribution of the noise.
        noise_scale: standard deviation (Gaussian) or b (Laplace) of the noise on the shared elements, at least 0.
        error_feedback: add what was not shared (not the noise) to the next round's update.
    """
    expect_number("defense.share", share, above=0, at_most=1, example=0.05)
    expect_one_of("defense.by", by, ("magnitude", "random"))
    expect_one_of("defense.scope", scope, ("layer", "global"))
    expect_one_of("defense.noise", noise, ("gaussian", "laplace"))
    expect_number("defense.noise_scale", noise_scale, at_least=0, example=0.01)
    expect_one_of("defense.error_feedback", error_feedback, (True, False))

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        masks: Tensors = {}

        def select(update: Tensors) -> Tensors:
            nonlocal masks
            scores = random_scores(update, rng) if by == "random" else {n: t.abs() for n, t in update.items()}
            masks = keep_largest(scores, drop=1 - share, scope=scope)
            return {name: t.masked_fill(~masks[name], 0.0) for name, t in update.items()}

        if error_feedback:
            shared = compress_with_feedback(select, tensors, state, owner="selective_sharing")
        else:
            shared = select(tensors)
        if noise_scale == 0:
            return shared
        return {n: t + sample_noise(t, noise, noise_scale, rng) * masks[n] for n, t in shared.items()}

    return Defense(
        name="selective_sharing",
        upload=(on_upload,),
        public={
            "share": share,
            "by": by,
            "scope": scope,
            "noise": noise,
            "noise_std": noise_std(noise, noise_scale),
            "error_feedback": error_feedback,
        },
    )
