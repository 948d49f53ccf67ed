"""Compare attempts with different losses by one rule, without the truth."""

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
"""An image has to fit the update exp(3) times better for each further unit of total variation; noise has about 0.7,
photographs about 0.1. If the update is exact, misfits differ by many orders and this decides nothing; if noise was
added, all attempts fit alike and the smoothest is taken, which is then the likeliest."""

EXACT = 1e-12
"""Mismatch of an update that is reproduced up to rounding in single precision."""

UNDERDETERMINED = 1e-6
"""The same if fewer values of the update are known than there are pixels: many images reproduce them, rough ones more
exactly, so that the smoothest below this is the likeliest."""

_LEAST_VARIATION = 0.01
"""Least total variation of an image."""


@dataclass(frozen=True, eq=False)
class Judgment:
    """Judgment of V attempts.

    Attributes:
        mismatch: (V,) geometric mean over the tensors of 1 - cosine of guess and upload, in [0, 2], within what a known
            or evident defense leaves open; tensors of noise change all attempts' alike.
        widest: (V,) the same of the tensor with the most elements, which noise affects the least.
        balance: (V,) weight of total variation that equals the rest of the attempt's own objective, as a share of a
            zero gradient's.
        score: (V,) ``log(mismatch) + ROUGHNESS * total variation``, at equal contrast if the model normalizes by the
            batch; the least wins. If noise says how smooth images are, angle and total variation at that weight.
            Infinite if it isn't a number.
    """

    mismatch: Tensor
    widest: Tensor
    balance: Tensor
    score: Tensor


@dataclass(frozen=True, kw_only=True)
class _OfAllLayers(Cosine):
    """Geometric mean over layers, instead of the arithmetic one."""

    per_layer: bool = True

    def __call__(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        terms = [self._of_layer(s).clamp_min(EXACT).log() for s in statistics.values()]
        return torch.stack(terms).mean(0).exp()

    def of_widest(self, statistics: Mapping[str, LayerStatistics]) -> Tensor:
        return self._of_layer(max(statistics.values(), key=lambda one: one.target.size))


_common, _angle = _OfAllLayers(epsilon=1e-12), Cosine()


@torch.no_grad()
def judge(problem: Problem, variables: Tensor) -> Judgment:
    """Judge the attempts ``variables`` (V, N), with their images cut to [0, 1]."""
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
    """Return the fall of the logarithm of the widest tensor's mismatch that free pixels explain.

    It is twice the number of pixels over that of the tensor's elements (Akaike 1974).
    """
    return 2 * problem.pixels / max(target.size for target in problem.rounds[-1].targets.values())


def _common_mismatch(
    problem: Problem, images: Tensor, labels: Tensor, hidden: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mismatches (V,) of all tensors, the widest and the whole, means over the rounds."""
    found = []
    for one, own in zip(problem.rounds, hidden, strict=True):
        statistics = one.statistics(images, labels, own)
        found.append(torch.stack([_common(statistics), _common.of_widest(statistics), _angle(statistics)]))
    all_layers, widest, angle = torch.stack(found).mean(0).double()
    return all_layers, widest, angle


def _is_underdetermined(problem: Problem) -> Tensor:
    """Return ``True`` (V,) if some values are known exactly, but fewer than pixels."""
    targets = [target for one in problem.rounds for target in one.targets.values()]
    bounds = [(target.low, target.high) for target in targets]
    bounded = [low.eq(high).sum(1) for low, high in bounds if low is not None and high is not None]
    free = sum(target.size for target in targets if target.low is None)
    exact = torch.stack(bounded).sum(0) if bounded else targets[0].squared.new_zeros(len(targets[0].squared))
    return (exact > 0) & (exact + free < problem.pixels)
