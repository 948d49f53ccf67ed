"""By what attempts with different losses are compared, without the truth: one rule for all."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.priors import Guess, TotalVariation
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.gradients import differentiable_twice

ROUGHNESS = 3.0
"""An image has to fit the update exp(3) times better for each unit of total variation that it has more: noise has about
0.7 of it, photographs about 0.1. Where the update is exact, misfits differ by many orders and this decides nothing;
where noise was added, all attempts fit alike and the smoothest is taken, which is then the likeliest."""

EXACT = 1e-12
"""Of the mismatch: reproduced but for rounding in single precision."""


@dataclass(frozen=True, eq=False)
class Judgment:
    """Of V attempts.

    Attributes:
        mismatch: (V,) half the squared distance of the guessed update's direction to the observed one's, which is
            1 - cosine, in [0, 2]: the same for every member, whatever it minimizes itself; within what a known or
            evident defense leaves open.
        variation: (V,) total variation of the images.
        score: (V,) ``log(mismatch) + ROUGHNESS * total variation``; the least wins. Infinite where it isn't a number.
    """

    mismatch: Tensor
    variation: Tensor
    score: Tensor


_roughness = TotalVariation(weight=1.0)
_common = Cosine()


@torch.no_grad()
def judge(problem: Problem, variables: Tensor) -> Judgment:
    """The attempts ``variables`` (V, N) at ``problem``, with their images cut to [0, 1]."""
    common = replace(problem, settings=replace(problem.settings, objective=_common, priors=()))
    images = common.images(variables).clamp(0, 1)
    transform = common.constraints.transform
    seen = transform(images) if transform else images
    with differentiable_twice(), torch.no_grad():
        mismatch = common.mismatch(seen, common.guessed_labels(variables), common.hidden_gradients(variables))
    rough = _roughness(Guess(images, 1, lambda: ()))
    mismatch = mismatch.double() / len(problem.rounds)
    score = (mismatch.clamp_min(EXACT)).log() + ROUGHNESS * rough.double()
    return Judgment(mismatch, rough.double(), score.nan_to_num(math.inf, math.inf, math.inf))
