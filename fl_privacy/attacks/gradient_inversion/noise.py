"""Estimate the noise in an update, and the smoothness of the likeliest images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.adaptive import Constraints
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.layer_statistics import Target
from fl_privacy.attacks.gradient_inversion.objectives import Cosine
from fl_privacy.attacks.gradient_inversion.problem import Problem, RoundUpdates
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.models.gradients import differentiable_twice
from fl_privacy.rng import derive_generator
from fl_privacy.types import Observation, Tensors

_LOUDEST = 3.0
"""Ratio of noise to gradient above which more smoothing leaves nothing but gray."""

_FEWEST = 8
"""Fewest columns of the output layer for an estimate."""

_STRENGTH = 0.25
"""Largest slope of total variation by a pixel over that which noise gives the objective; chosen on networks with and
without batch norm, trained or not, whose weights at that strength are from 0.002 to 2."""

_EDGE = 0.05
"""Move of a pixel by noise that calls for that strength: about the difference of neighbors in photographs."""

_COARSE = 4
"""Side of the random images on which noise is rehearsed, before they are resized to the victim's."""


def noise_over_gradient(observation: Observation) -> float | None:
    """Return the norm of the noise in the update over that of the gradient, at most 3.

    Gradients of cross entropy by the logits sum to zero over the classes, and so do the columns of the output layer's
    weight and bias; their sums are noise, or rounding of 1e-6.

    Returns:
        ``None`` without an output layer, with too few columns, or for steps of Adam.
    """
    if observation.plan.shares != "gradient" and observation.plan.optimizer != "sgd":
        return None
    update = as_gradient(observation)
    layer = output_layer(observation.model, observation.num_classes)
    return None if layer is None else _ratio(update, [name for name in layer if name])


def ratio_of_gradient(gradient: Tensors, observation: Observation) -> float:
    """Return the noise ratio of a noiseless ``gradient``: rounding, or more without softmax."""
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


Smoothing = tuple[float, float]
"""Weights of total variation at which the images behind a noisy update are likeliest, relative to the attack's
objective and to the angle of the whole update."""


def smoothing_of(
    observations: Sequence[Observation], problem: Callable[[slice], Problem], at_once: int
) -> list[Smoothing] | None:
    """Measure the smoothing of each observation, ``at_once`` at a time; ``None`` if the noise is unknown."""
    ratios = [noise_over_gradient(observation) for observation in observations]
    told = [ratio for ratio in ratios if ratio is not None]
    if len(told) < len(ratios):
        return None
    found: list[Smoothing] = []
    for begin in range(0, len(told), at_once):
        chunk = slice(begin, begin + at_once)
        found += zip(*(weights.tolist() for weights in _smoothing(problem(chunk), told[chunk])), strict=True)
    return found


def _smoothing(problem: Problem, ratios: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return weights (V,) of total variation at which noise doesn't show, for the attack's objective and the angle.

    The best weight grows with the noise (Rudin, Osher and Fatemi 1992), whose effect on pixels is rehearsed: if the
    gradient of public images is matched but for noise as loud as the update's, ``ratios`` (V,), all of the slope is
    noise. The move of a pixel follows from the objective's rise towards other images; moves below ``_EDGE`` are
    smoothed less. Weights are zero if a rehearsal shows nothing.
    """
    loud = torch.tensor(ratios).to(problem.zero_loss())
    rng = derive_generator(0, "rehearsed noise")
    images, other = (_public_images(problem, len(loud), rng).to(loud) for _ in range(2))
    speckled = images + _EDGE * torch.randn(images.shape[1:], generator=rng).to(loud)
    labels = problem.labels
    if labels is None:
        labels = loud.new_full((len(loud), len(images[0]), problem.num_classes), 1 / problem.num_classes)
    own = replace(problem, constraints=Constraints())
    angle = replace(own, settings=replace(problem.settings, objective=Cosine()))
    gradients = [_gradients(one, images, labels) for one in problem.rounds]
    noise = [{name: torch.randn(t.shape[1:], generator=rng).to(t) for name, t in one.items()} for one in gradients]
    clean = angle.matching([_noisy(one, more, 0 * loud) for one, more in zip(gradients, noise, strict=True)])
    rounds = [_noisy(one, more, loud) for one, more in zip(gradients, noise, strict=True)]
    pull = _pull(angle.matching(rounds), images, labels)
    moved = pull / torch.stack([_rise(clean, images, each, labels) for each in (other, speckled)]).amin(0)
    strength = _STRENGTH * (moved / _EDGE).clamp(max=1) * (1 + loud.square()).sqrt() * images[0].numel()
    rehearsed = own.matching(rounds)
    unit = problem.zero_loss() / rehearsed.zero_loss()
    weights = strength * _pull(rehearsed, images, labels) * unit, strength * pull / len(rounds)
    known = torch.stack(weights).isfinite().all(0)
    return weights[0].where(known, 0), weights[1].where(known, 0)


def _public_images(problem: Problem, number: int, rng: torch.Generator) -> Tensor:
    """Draw public images (V, B, C, H, W), the same for all victims."""
    size, channels, *sides = problem.shape
    coarse = torch.rand((size, channels, _COARSE, _COARSE), generator=rng)
    return F.interpolate(coarse, sides, mode="bilinear").expand(number, *problem.shape).contiguous()


def _gradients(one: RoundUpdates, images: Tensor, labels: Tensor) -> Tensors:
    with differentiable_twice(), torch.no_grad():
        return {name: value.detach() for name, value in one.gradients(images, labels).items()}


def _noisy(gradients: Tensors, noise: Tensors, loud: Tensor) -> dict[str, Target]:
    """Add ``noise`` at ``loud`` (V,) times the gradient's norm."""
    length = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0).sqrt()
    each = loud * length / torch.stack([value.square().sum() for value in noise.values()]).sum().sqrt()
    return {
        name: Target.of(value + each.view(-1, *[1] * (value.dim() - 1)) * noise[name])
        for name, value in gradients.items()
    }


def _rise(problem: Problem, images: Tensor, others: Tensor, labels: Tensor) -> Tensor:
    """Return the objective's rise (V,) towards ``others``, per half the squared distance."""
    with differentiable_twice(), torch.no_grad():
        risen = problem.mismatch(others, labels, [None] * len(problem.rounds))
    return 2 * risen / (others - images).flatten(1).square().sum(1)


def _pull(problem: Problem, images: Tensor, labels: Tensor) -> Tensor:
    with differentiable_twice():
        leaf = images.detach().requires_grad_()
        loss = problem.mismatch(leaf, labels, [None] * len(problem.rounds))
        (slope,) = torch.autograd.grad(loss.sum(), leaf)
    return slope.flatten(1).square().mean(1).sqrt()
