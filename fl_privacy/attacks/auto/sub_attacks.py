"""The descents that ``attack=auto`` chooses from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fl_privacy.attacks.adaptive import KnownDefense, all_known
from fl_privacy.attacks.gradient_inversion import GradientInversion
from fl_privacy.attacks.gradient_inversion.evident_defense import noise_over_gradient
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.objectives import L2, Cosine
from fl_privacy.attacks.gradient_inversion.preparation import circumstances_of
from fl_privacy.attacks.gradient_inversion.priors import BatchNormStatistics, ColorRange, TotalVariation
from fl_privacy.attacks.gradient_inversion.starts import Blank, PublicMean
from fl_privacy.attacks.gradient_inversion.targets import needs_unrolling
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.attacks.presets import inverting_gradients
from fl_privacy.effects import Quantized, Sparse
from fl_privacy.types import Observation

_ROUGH = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.Hardswish, nn.MaxPool2d, nn.AdaptiveMaxPool2d),
    *(nn.MultiheadAttention, nn.LayerNorm),
)

_THIN, _HELD = 0.25, 0.1
"""Known values per pixel of a smooth model below which smoothness decides more than the fit, and the weight of total
variation that is not eased there; behind kinks one value per pixel is the limit."""

_BEHIND_ADAM = 0.005
"""Weight of total variation, which is not eased, for the angle of the values that a step of Adam leaves."""

_MOVES = 20
"""Moves in an iteration of L-BFGS."""


@dataclass(frozen=True, kw_only=True)
class Faint:
    """Start near gray, within ``spread`` around 0.5, from which descents get further than from noise."""

    spread: float = 0.2

    def __call__(self, blank: Blank) -> Tensor:
        return blank.space.to_variables(0.5 + self.spread * (torch.rand(blank.shape, generator=blank.generator) - 0.5))


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A descent, whose attempts differ in start and smoothness.

    Attributes:
        attack: attack without total variation, which the attempts add.
        evaluations: most evaluations of the loss in one iteration.
        staged: ``True`` cuts its last rung in stages; not with a schedule of the learning rate.
    """

    name: str
    attack: GradientInversion
    evaluations: int = 1
    staged: bool = False

    def settings(self, evaluations: int) -> GradientInversion:
        return replace(self.attack, iterations=max(1, evaluations // self.evaluations))


Entry = tuple[Contender, int, float]
"""A contender, the number of its start, and the weight of total variation that it starts with, as a share of the loss
of a zero gradient."""


def entries(
    observation: Observation, most: int, placed: Callable[[GradientInversion], GradientInversion]
) -> list[Entry]:
    """List at most ``most`` attempts, those first that leak most; ``placed`` sets device and dtype."""
    found = (replace(contender, attack=placed(contender.attack)) for contender in _contenders(observation))
    curved, layered, squared, signed, usual = found
    # quasi-Newton methods get far if no layer has a kink or is a transformer's
    smooth = not any(isinstance(module, _ROUGH) for module in observation.model.modules())
    thin = _share_known(observation)
    if observation.knowledge.bounds is not None:
        # a step of Adam leaves only small values of a gradient: try images that stay smooth
        held = replace(signed, attack=replace(signed.attack, priors=(TotalVariation(weight=_BEHIND_ADAM),)))
        smoother = replace(signed, attack=replace(signed.attack, priors=(TotalVariation(weight=4 * _BEHIND_ADAM),)))
        chosen = [(held, 0, 0.0), (held, 1, 0.0), (smoother, 0, 0.0), (curved, 0, 1e-2)]
    elif thin < (_THIN if smooth else 1):
        smoothed = replace(signed, attack=replace(signed.attack, priors=(TotalVariation(weight=_HELD),)))
        chosen = [(smoothed, 0, 1e-1), (smoothed, 1, 1e-1), (smoothed, 2, 3e-1), (curved, 0, 3e-1), (layered, 0, 1e-1)]
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
    if any(layer.track_running_stats for layer in layers) and any(
        name.endswith("running_mean") and bool(value.any()) for name, value in observation.sent.buffers.items()
    ):
        chosen[1:1] = [(usual, 0, 1e-1), (usual, 1, 1e-2)]
    more = [(curved, 1e-3), (layered, 1e-3)] if smooth else [(signed, 4e-1), (signed, 1e-1)]
    if _is_noisy(observation):
        more = [(signed, 0.0), (curved, 0.0)]
    start = 5
    while len(chosen) < most:
        chosen += [(contender, start, weight) for contender, weight in more]
        start += 1
    return chosen[:most]


def _contenders(observation: Observation) -> Sequence[Contender]:
    """List the descents: L-BFGS on angle, each layer's angle and distance, and signed Adam.

    Layers count equally in the second, as gradients before saturated activations can be a thousand times smaller.
    """
    # optimize labels with the images if nothing leaks them
    layer = output_layer(observation.model, observation.num_classes)
    seen = layer is not None and any(name in observation.upload.tensors for name in layer if name)
    base = replace(
        inverting_gradients(),
        priors=(),
        start=Faint() if observation.knowledge.public_images is None else PublicMean(),
        labels="auto" if seen or observation.knowledge.labels is not None else "optimize",
        compile="off",
    )
    lbfgs = LBFGS(inner=_MOVES, line_search="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0)
    searching = replace(base, optimizer=lbfgs, projection="none", priors=(ColorRange(weight=1.0),))
    statistics = (BatchNormStatistics(weight=1e-3),)
    most = _MOVES * 5 // 4
    return (
        Contender(name="cosine by L-BFGS", attack=searching, evaluations=most, staged=True),
        Contender(
            name="cosine of each layer by L-BFGS",
            attack=replace(searching, objective=Cosine(per_layer=True, epsilon=1e-12)),
            evaluations=most,
            staged=True,
        ),
        Contender(
            name="L2 by L-BFGS", attack=replace(searching, objective=L2(relative=True)), evaluations=most, staged=True
        ),
        Contender(name="cosine by signed Adam", attack=base),
        Contender(name="cosine and batch-norm statistics by signed Adam", attack=replace(base, priors=statistics)),
    )


def _share_known(observation: Observation) -> float:
    """Return the known values per pixel that a defense left in the update; infinite if it left all."""
    parts = observation.knowledge.defense or ()
    if not any(isinstance(part.effect, Sparse) for part in parts):
        return math.inf
    unrounded = observation.told(defense=tuple(part for part in parts if not isinstance(part.effect, Quantized)))
    update = observation.update()
    bounds = _known_defense(unrounded).bounds(update)
    if all_known(bounds):
        return math.inf
    left = sum(int((low == high).sum()) for low, high in bounds.values())
    left += sum(value.numel() for name, value in update.items() if name not in bounds)
    return left / (observation.upload.num_examples * math.prod(observation.input_shape))


def _is_noisy(observation: Observation) -> bool:
    known = _known_defense(observation)
    return (
        known.noisy and all_known(known.bounds(observation.update())) and noise_over_gradient(observation) is not None
    )


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
    """Return ``True`` if the client's batch norm used its own batch's statistics."""
    layers = (module for module in observation.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return observation.plan.batch_norm == "train" and any(True for _ in layers)
