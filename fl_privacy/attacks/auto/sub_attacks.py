"""The descents that ``attack=auto`` tries, and their numbers of evaluations."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive import KnownDefense, all_known
from fl_privacy.attacks.attack import seconds_left
from fl_privacy.attacks.gradient_inversion import GradientInversion, Space
from fl_privacy.attacks.gradient_inversion.evident_defense import noise_over_gradient
from fl_privacy.attacks.gradient_inversion.labels import output_layer, policy_for
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.preparation import circumstances_of
from fl_privacy.attacks.gradient_inversion.priors import (
    BatchNormStatistics,
    ColorRange,
    TotalVariation,
    uploaded_statistics,
)
from fl_privacy.attacks.gradient_inversion.settings import PublicMean, VictimContext
from fl_privacy.attacks.gradient_inversion.targets import needs_unrolling
from fl_privacy.attacks.optimizers import LBFGS, Adam, StepDecay
from fl_privacy.effects import Quantized, Sparse
from fl_privacy.types import Observation

logger: logging.Logger = logging.getLogger(__name__)
Budget = Literal["quick", "standard", "thorough"]

EVALUATIONS: Mapping[str, int] = {"quick": 600, "standard": 4800, "thorough": 24_000}
"""Evaluations of loss and gradient for each victim, over all attempts; ``inverting_gradients`` takes ``standard``."""

_KEPT = 3  # number of attempts of which one goes on to the next rung
_LAST = 0.75  # share of the evaluations that the best attempt gets in the last rung
_MOST = 27  # most attempts at a victim
_STAGE = 150  # fewest evaluations of a stage of the last rung; total variation is eased at each stage
_STAGES = 4  # most stages
LEAST = 25  # evaluations below which an attempt shows nothing: one iteration of L-BFGS

SOLVED = 0.75  # largest share of a budget in seconds for exact solutions, since some victims need a hundred rounds

_PILOTS = (5, 25, 125)  # evaluations that measure the time of one; the first of a process take longer
_PILOTED = 0.1  # share of the time left that the next measurement may take


@dataclass(frozen=True)
class Rung:
    """Round of successive halving, in which each attempt gets ``evaluations`` of the loss.

    The evaluations are split into ``stages``; from one to the next, total variation gets less weight.
    """

    attempts: int  # number of attempts
    evaluations: int  # number for each attempt
    stages: int = 1  # number of stages


def most_attempts(evaluations: int) -> int:
    """Return the most gradient descents that successive halving can compare within ``evaluations``."""
    most = [n for n in range(1, _MOST + 1) if n * LEAST * (len(rungs(evaluations, n)) - 1) <= (1 - _LAST) * evaluations]
    return max(most, default=1)


def affordable(evaluations: float, extra: int) -> int:
    """Return the most evaluations whose :func:`rungs`, with ``extra`` more attempts, cost at most ``evaluations``."""
    number = max(LEAST, int(evaluations))
    while number > LEAST:
        planned = rungs(number, most_attempts(number) + extra)
        if sum(rung.attempts * rung.evaluations for rung in planned) <= evaluations:
            break
        number = max(LEAST, number - max(1, number // 50))
    return number


def time_of_one(seconds_of_each: Callable[[int], float]) -> float:
    """Return the seconds of one evaluation; ``seconds_of_each(n)`` measures it with n evaluations."""
    each = 0.0
    for evaluations in _PILOTS:
        if evaluations * each > _PILOTED * seconds_left():
            break
        each = seconds_of_each(evaluations)
    return each


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def evaluations_in_time(work: Callable[[int], object], victims: int, *, cut: bool) -> int:
    """Return and log the evaluations per victim that fit into the time left.

    ``work``: function that runs n evaluations; it is timed. ``cut``: ``True`` if the time limit has stopped a search
    for exact solutions, which the log then mentions.
    """
    each = time_of_one(lambda number: seconds_of(lambda: work(number)) / number)
    found = max(LEAST, int(seconds_left() / each))
    logger.info(how_to_repeat(found, victims, cut=cut))
    return found


def how_to_repeat(evaluations: int, victims: int, *, cut: bool) -> str:
    """Return a sentence for users: the value of ``attack.evaluations`` that repeats a run limited by seconds.

    ``cut``: ``True`` if the time limit also stopped the search for exact solutions, which is not repeated.
    """
    but = ", which repeat the descents but not what they start from: the clock ended a search for exact answers"
    return f"The seconds came to attack.evaluations={evaluations} for {victims} victims{but * cut}."


def rungs(evaluations: int, attempts: int) -> list[Rung]:
    """Plan successive halving (Jamieson and Talwalkar 2016): rounds that share out ``evaluations`` to ``attempts``."""
    numbers = [attempts]
    while numbers[-1] > 1:
        numbers.append(math.ceil(numbers[-1] / _KEPT))
    last = int(_LAST * evaluations) if attempts > 1 else evaluations
    each = (1 - _LAST) * evaluations / max(1, len(numbers) - 1)
    early = [Rung(count, max(LEAST, int(each / count))) for count in numbers[:-1]]
    return [*early, Rung(1, max(LEAST, last), stages=max(1, min(_STAGES, last // _STAGE)))]


_ROUGH = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.Hardswish, nn.MaxPool2d, nn.AdaptiveMaxPool2d),
    *(nn.MultiheadAttention, nn.LayerNorm),
)

_THIN, _FIXED = 0.25, 0.1
"""Known values per pixel below which smoothness matters more than the fit, and the weight of total variation then."""

_BEHIND_ADAM = 0.005  # fixed weight of total variation if only a step of Adam is known

_MOVES = 20  # steps in an iteration of L-BFGS


@dataclass(frozen=True, kw_only=True)
class GrayStart:
    """Start from random pixels around gray (0.5), which ends with less loss than a start from noise."""

    spread: float = 0.2  # range of the pixels

    def __call__(self, context: VictimContext) -> Tensor:
        uniform = torch.rand(context.shape, generator=context.generator)
        return context.space.to_variables(0.5 + self.spread * (uniform - 0.5))


@dataclass(frozen=True, kw_only=True, eq=False)
class SubAttack:
    """Gradient inversion that ``attack=auto`` runs several times, with other starts and weights of total variation."""

    name: str
    attack: GradientInversion  # attack without total variation, which the attempts add
    evaluations: int = 1  # most evaluations of the loss in one iteration
    staged: bool = False  # ``True`` cuts its last rung in stages; not with a schedule of the learning rate


Entry = tuple[SubAttack, int, float]
"""A sub-attack, the number of its start, and its first weight of total variation, as a share of a zero gradient's."""


def entries(
    observation: Observation, most: int, placed: Callable[[GradientInversion], GradientInversion]
) -> list[Entry]:
    """List at most ``most`` attempts at ``observation``, best first; ``placed`` sets the device of an attack."""
    found = (replace(contender, attack=placed(contender.attack)) for contender in _sub_attacks_for(observation))
    curved, layered, squared, signed, usual = found
    # quasi-Newton methods get far if no layer has a kink or is a transformer's
    smooth = not any(isinstance(module, _ROUGH) for module in observation.model.modules())
    thin = _known_values_per_pixel(observation)

    def smoothed(weight: float) -> SubAttack:
        return replace(signed, attack=replace(signed.attack, priors=(TotalVariation(weight=weight),)))

    if observation.knowledge.bounds is not None:
        # a step of Adam leaves only small values of a gradient: try images that stay smooth
        fixed = smoothed(_BEHIND_ADAM)
        chosen = [(fixed, 0, 0.0), (fixed, 1, 0.0), (smoothed(4 * _BEHIND_ADAM), 0, 0.0), (curved, 0, 1e-2)]
    elif thin < (_THIN if smooth else 1):
        fixed = smoothed(_FIXED)
        chosen = [(fixed, 0, 1e-1), (fixed, 1, 1e-1), (fixed, 2, 3e-1), (curved, 0, 3e-1), (layered, 0, 1e-1)]
    elif thin < 1:
        chosen = [(curved, 0, 3e-1), (signed, 0, 4e-1), (curved, 1, 1e-1), (signed, 1, 1e-1), (layered, 0, 1e-1)]
    elif _is_noisy(observation):
        chosen = [(signed, 0, 0.0), (signed, 1, 0.0), (signed, 2, 0.0), (curved, 0, 0.0)]
    elif smooth and observation.upload.num_examples > 1:
        chosen = [(curved, 0, 1e-2), (curved, 1, 1e-1), (signed, 0, 1e-1), (layered, 0, 1e-2), (squared, 0, 1e-2)]
        chosen += [(curved, 2, 1e-3), (layered, 1, 1e-3), (signed, 1, 4e-2), (curved, 3, 1e-2)]
    elif smooth:
        chosen = [(curved, 0, 1e-3), (layered, 0, 1e-3), (curved, 1, 1e-2), (squared, 0, 1e-3), (signed, 0, 4e-2)]
        chosen += [(layered, 1, 1e-2), (curved, 2, 1e-3), (squared, 1, 1e-3), (signed, 1, 4e-4)]
    else:
        chosen = [(signed, 0, 3e-1), (signed, 1, 1e-3), (signed, 2, 5e-2), (signed, 3, 1e-4), (curved, 0, 1e-2)]
        chosen += [(signed, 4, 4e-1), (squared, 0, 1e-2)]
    layers = [m for m in observation.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    trained = any(
        name.endswith("running_mean") and bool(value.any()) for name, value in observation.sent.buffers.items()
    )
    if any(layer.track_running_stats for layer in layers) and (trained or uploaded_statistics(observation)):
        chosen[1:1] = [(usual, 0, 1e-1), (usual, 1, 1e-2)]
    more = [(curved, 1e-3), (layered, 1e-3)] if smooth else [(signed, 4e-1), (signed, 1e-1)]
    if _is_noisy(observation):
        more = [(signed, 0.0), (curved, 0.0)]
    chosen += [(contender, start, weight) for start in range(5, 5 + most) for contender, weight in more]
    return chosen[:most]


def _sub_attacks_for(observation: Observation) -> Sequence[SubAttack]:
    statistics = (BatchNormStatistics(weight=0.1 if uploaded_statistics(observation) else 1e-3),)
    base = GradientInversion(
        objective=Cosine(),
        optimizer=Adam(lr=0.1, sign="hard", schedule=StepDecay()),
        space=Space(mean=0.5, std=0.25),
        projection="clamp",
        start=GrayStart() if observation.knowledge.public_images is None else PublicMean(),
        labels=policy_for(observation),
        compile="off",
    )
    lbfgs = LBFGS(inner=_MOVES, line_search="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0)
    searching = replace(base, optimizer=lbfgs, projection="none", priors=(ColorRange(weight=1.0),))
    by_layer = replace(searching, objective=Cosine(per_layer=True, epsilon=1e-12))
    curved = SubAttack(name="cosine by L-BFGS", attack=searching, evaluations=_MOVES * 5 // 4, staged=True)
    return (
        curved,
        replace(curved, name="cosine of each layer by L-BFGS", attack=by_layer),
        replace(curved, name="L2 by L-BFGS", attack=replace(searching, objective=L2(relative=True))),
        SubAttack(name="cosine by signed Adam", attack=base),
        SubAttack(name="cosine and batch-norm statistics by signed Adam", attack=replace(base, priors=statistics)),
    )


def _known_values_per_pixel(observation: Observation) -> float:
    """Return the number of exactly known update values per pixel after sparsification; infinite if all are known."""
    parts = observation.knowledge.defense or ()
    if not any(isinstance(part.effect, Sparse) for part in parts):
        return math.inf
    unrounded = observation.given(defense=tuple(part for part in parts if not isinstance(part.effect, Quantized)))
    bounds = _known_defense(unrounded).bounds(update := observation.update())
    if all_known(bounds):
        return math.inf
    left = sum(int((low == high).sum()) for low, high in bounds.values())
    left += sum(value.numel() for name, value in update.items() if name not in bounds)
    return left / (observation.upload.num_examples * math.prod(observation.input_shape))


def _is_noisy(observation: Observation) -> bool:
    known = _known_defense(observation)
    if not known.noisy or not all_known(known.bounds(observation.update())):
        return False
    return noise_over_gradient(observation) is not None


def _known_defense(observation: Observation) -> KnownDefense:
    layer = output_layer(observation.model, observation.num_classes)
    circumstances = circumstances_of(
        observation,
        unrolls=needs_unrolling(observation.plan, observation.upload.num_examples, "unroll"),
        scales=True,
        complete=True,
        smooths=False,
        pixels=True,
        learnable=[layer[0]] if layer else [],
    )
    return KnownDefense.of(observation, circumstances)


def normalizes_by_batch(observation: Observation) -> bool:
    """Return whether the client's batch norm normalized by the statistics of its own batch."""
    norms = (isinstance(module, nn.modules.batchnorm._BatchNorm) for module in observation.model.modules())
    return observation.plan.batch_norm == "train" and any(norms)
