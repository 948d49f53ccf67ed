"""By what attempts with different losses are compared, without the truth: one rule for all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.layer_statistics import LayerStatistics
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.priors import Guess
from fl_privacy.attacks.gradient_inversion.problem import Problem
from fl_privacy.models.gradients import differentiable_twice

ROUGHNESS = 3.0
"""An image has to fit the update exp(3) times better for each unit of total variation that it has more: noise has about
0.7 of it, photographs about 0.1. Where the update is exact, misfits differ by many orders and this decides nothing;
where noise was added, all attempts fit alike and the smoothest is taken, which is then the likeliest."""

EXACT = 1e-12
"""Of the mismatch: reproduced but for rounding in single precision."""

UNDERDETERMINED = 1e-6
"""The same where fewer values of the update are known than there are pixels: many images reproduce them, rough ones
more exactly, so that below this the smoothest is the likeliest."""

_LEAST_VARIATION = 0.01
"""Total variation of an image that has next to none."""


@dataclass(frozen=True, eq=False)
class Judgment:
    """Judgment of V attempts, by which they are compared.

    Attributes:
        mismatch: (V,) geometric mean, over the uploaded tensors, of half the squared distance of the guessed tensor's
            direction to the observed one's, which is 1 - cosine, in [0, 2]: the same for every member, whatever it
            minimizes itself; within what a known or evident defense leaves open. A tensor of noise alone multiplies
            it by the same for every attempt, and one whose gradients are small counts like a large one.
        widest: (V,) the same of the tensor with the most elements alone, which noise decides the least.
        balance: (V,) the weight of total variation at which it is as large as what the member's own objective leaves,
            as a share of that of a zero gradient: with less, what fits is noise; with more, it holds the fit back.
        score: (V,) ``log(mismatch) + ROUGHNESS * total variation``, the latter of images of equal contrast where the
            model normalizes by the batch; the least wins. Where noise says how smooth the images are, the angle of the
            whole update and as much total variation as that. Infinite where it isn't a number.
    """

    mismatch: Tensor
    widest: Tensor
    balance: Tensor
    score: Tensor


@dataclass(frozen=True, kw_only=True)
class _OfAllLayers(Cosine):
    """Geometric mean over layers, where ``Cosine(per_layer=True)`` takes the arithmetic one."""

    per_layer: bool = True

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        terms = [self._of_layer(s).clamp_min(EXACT).log() for s in statistics.values()]
        return torch.stack(terms).mean(0).exp()

    def of_widest(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        """Return the statistic of the tensor with the most elements."""
        return self._of_layer(max(statistics.values(), key=lambda one: one.target.size))


_common, _angle = _OfAllLayers(epsilon=1e-12), Cosine()


@torch.no_grad()
def judge(problem: Problem, variables: Tensor) -> Judgment:
    """Judge the attempts ``variables`` (V, N) at ``problem``, with their images cut to [0, 1]."""
    images = problem.images(variables).clamp(0, 1)
    transform = problem.constraints.transform
    seen = transform(images) if transform else images
    given = seen, problem.guessed_labels(variables), problem.hidden_gradients(variables)
    with differentiable_twice(), torch.no_grad():
        mismatch, widest, angle = _common_mismatch(problem, *given)
        misfit = (problem.mismatch(*given) / problem.zero_loss()).double()
    rough = problem.roughness(Guess(images, 1, lambda: ())).double()
    least = torch.where(_is_underdetermined(problem), UNDERDETERMINED, EXACT)
    score = torch.maximum(mismatch, least.to(mismatch)).log() + ROUGHNESS * rough
    if (weight := problem.constraints.likeliest) is not None:
        weight = weight.double()
        score = torch.where(weight > 0, angle / weight.clamp_min(EXACT) + rough, score)
    balance = misfit / rough.clamp_min(_LEAST_VARIATION)
    return Judgment(mismatch, widest, balance, score.nan_to_num(math.inf, math.inf, math.inf))


def margin(problem: Problem) -> float:
    """Return by how much the logarithm of the widest tensor's mismatch falls merely because all pixels are free.

    Twice the number of pixels over that of the tensor's elements (Akaike 1974): free pixels also suit noise, and the
    fewer outputs a layer has, the better.
    """
    return 2 * problem.pixels / max(target.size for target in problem.rounds[-1].targets.values())


def _common_mismatch(
    problem: Problem, images: Tensor, labels: Tensor, hidden: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mismatches (V,) of all tensors, of the widest one and of all as a whole, means over the rounds."""
    found = []
    for one, own in zip(problem.rounds, hidden, strict=True):
        statistics = one.statistics(images, labels, own)
        found.append(torch.stack([_common(statistics), _common.of_widest(statistics), _angle(statistics)]))
    all_layers, widest, angle = torch.stack(found).mean(0).double()
    return all_layers, widest, angle


def _is_underdetermined(problem: Problem) -> Tensor:
    """Say for each victim (V,) whether some values are known exactly, and in all fewer than there are pixels."""
    targets = [target for one in problem.rounds for target in one.targets.values()]
    bounds = [(target.low, target.high) for target in targets]
    bounded = [low.eq(high).sum(1) for low, high in bounds if low is not None and high is not None]
    free = sum(target.size for target in targets if target.low is None)
    exact = torch.stack(bounded).sum(0) if bounded else targets[0].squared.new_zeros(len(targets[0].squared))
    return (exact > 0) & (exact + free < problem.pixels)
