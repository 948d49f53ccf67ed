"""How noisy an update is, and how smooth the likeliest images behind a noisy one are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.adaptive import Constraints
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.problem import Problem, Round
from fl_privacy.attacks.gradient_inversion.statistics import Target
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.gradients import differentiable_twice
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation, Tensors

_LOUDEST = 3.0
"""Norm of the noise over that of the gradient from which smoothing more leaves nothing but gray."""

_FEWEST = 8
"""Columns of the output layer that tell a spread."""

_STRENGTH = 0.25
"""Total variation's slope by a pixel over that which noise gives the objective; chosen on networks with and without
batch norm, trained or not, whose weights at that strength are from 0.002 to 2: where others do better by more than a
decibel, it is by more smoothness."""

_COARSE = 4
"""Side of the random images on which noise is rehearsed, before they are brought to the size of the victim's."""


def noise_ratio(observation: Observation) -> float | None:
    """Norm of the noise in the update of ``observation`` over that of the gradient, at most 3.

    The gradient of cross entropy by the logits adds up to zero over the classes, so that each column of the output
    layer's weight does, and its bias: what they add up to is noise. Rounding in single precision comes to 1e-6.

    Returns:
        ``None`` where there is no output layer, or too few columns.
    """
    update = as_gradient(observation)
    layer = output_layer(observation.model, observation.num_classes)
    return None if layer is None else _ratio(update, [name for name in layer if name])


def ratio_of_gradient(gradient: Tensors, observation: Observation) -> float:
    """The same of a ``gradient`` without noise: as large as it gets by rounding, or where a model is no classifier by
    softmax."""
    layer = output_layer(observation.model, observation.num_classes)
    return (layer and _ratio(gradient, [name for name in layer if name])) or 0.0


def _ratio(update: Tensors, layer: Sequence[str]) -> float | None:
    found = [update[name].double() for name in layer if name in update]
    sums = torch.cat([tensor.sum(0).flatten() for tensor in found]) if found else torch.zeros(0)
    if len(sums) < _FEWEST:
        return None
    count = sum(tensor.numel() for tensor in update.values())
    squared = sum(float(tensor.double().square().sum()) for tensor in update.values())
    noise = count * float(sums.square().mean()) / len(found[0])
    return math.sqrt(min(noise / max(squared - noise, 1e-300), _LOUDEST**2)) if squared else 0.0


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Weights (V,) of total variation at which the images behind noisy updates are likeliest.

    Attributes:
        own: beside the attack's objective.
        angle: beside the angle of the whole update.
    """

    own: Tensor
    angle: Tensor


def smoothing(problem: Problem, ratios: Sequence[float]) -> Smoothing:
    """How strongly total variation has to hold each pixel for noise not to show.

    What denoises best grows with the noise (Rudin, Osher and Fatemi 1992); how far noise in a gradient reaches the
    pixels depends on network and objective. It is rehearsed: where the gradient of public images is matched but for
    noise as loud as in the update, all of the objective's slope is the noise's doing.

    Args:
        problem: of V victims.
        ratios: norm of the noise over that of the gradient, of each.
    """
    loud = torch.tensor(ratios).to(problem.zero_loss())
    rng = derive_generator(0, "rehearsed noise")
    size, channels, *sides = problem.shape
    images = F.interpolate(torch.rand((size, channels, _COARSE, _COARSE), generator=rng), sides, mode="bilinear")
    images = images.to(loud).expand(len(loud), *problem.shape).contiguous()
    labels = problem.labels
    if labels is None:
        labels = loud.new_full((len(loud), size, problem.num_classes), 1 / problem.num_classes)
    rehearsed = replace(
        problem,
        rounds=[_rehearsed(one, images, labels, loud, rng) for one in problem.rounds],
        constraints=Constraints(),
    )
    strength = _STRENGTH * (1 + loud.square()).sqrt() * images[0].numel()
    own = strength * _pull(rehearsed, images, labels) / rehearsed.zero_loss() * problem.zero_loss()
    if problem.settings.objective == Cosine():
        return Smoothing(own, own)
    angle = replace(rehearsed, settings=replace(problem.settings, objective=Cosine()))
    return Smoothing(own, strength * _pull(angle, images, labels) / len(problem.rounds))


def _rehearsed(one: Round, images: Tensor, labels: Tensor, loud: Tensor, rng: torch.Generator) -> Round:
    """As if ``images`` (V, B, C, H, W) had been the clients'; the noise (V,) ``loud`` is the same for all victims."""
    with differentiable_twice(), torch.no_grad():
        gradients = {name: value.detach() for name, value in one.gradients(images, labels).items()}
    noise = {name: torch.randn(value.shape[1:], generator=rng).to(value) for name, value in gradients.items()}
    length = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0).sqrt()
    each = loud * length / torch.stack([value.square().sum() for value in noise.values()]).sum().sqrt()
    targets = {
        name: Target.of(value + each.view(-1, *[1] * (value.dim() - 1)) * noise[name])
        for name, value in gradients.items()
    }
    return replace(one, targets=targets, factors={}, clip=None, compared=())


def _pull(problem: Problem, images: Tensor, labels: Tensor) -> Tensor:
    """(V,) root mean square of the slope by a pixel."""
    with differentiable_twice():
        leaf = images.detach().requires_grad_()
        loss = problem.mismatch(leaf, labels, [None] * len(problem.rounds))
        (slope,) = torch.autograd.grad(loss.sum(), leaf)
    return slope.flatten(1).square().mean(1).sqrt()
