"""Priors of natural images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_privacy.attacks.gradient_inversion.layer_statistics import AbsoluteDifferences
from fl_privacy.models.gradients import frozen_copy, number_of_steps
from fl_privacy.models.gradients.hooks import ModuleCall, entering
from fl_privacy.types import Observation, Tensors


@dataclass(frozen=True, eq=False)
class BatchStatistics:
    """Mean and variance (V, C) of V guesses in a batch-norm layer, and the usual ones: (C,) or, if uploaded, (V, C)."""

    mean: Tensor
    variance: Tensor
    usual_mean: Tensor
    usual_variance: Tensor


@dataclass(frozen=True, eq=False)
class Guess:
    """Input of a prior: ``images`` (V, B, C, H, W) of V guesses, before a transform that the defense may have applied.

    Each ``attempts`` consecutive guesses are of one victim. ``batch_statistics``: function that returns the statistics
    of the transformed images in each batch-norm layer.
    """

    images: Tensor
    attempts: int
    batch_statistics: Callable[[], Sequence[BatchStatistics]]


Prior = Callable[[Guess], Tensor]
"""Guess -> weighted penalty (V,). The attribute ``smooths`` is ``True`` for priors that smooth images."""


CONTRAST = 0.25  # typical standard deviation of a photograph's pixels in [0, 1]; CIFAR-10's are between 0.24 and 0.26


@dataclass(frozen=True, kw_only=True)
class TotalVariation:
    """Total variation: the mean absolute (or Euclidean) difference of neighboring pixels.

    ``relative``: ``True`` first scales images to a photograph's contrast (:data:`CONTRAST`), for models that normalize
    by the batch and ignore contrast, so that faint images do not count as smooth.
    """

    weight: float = 1e-4
    isotropic: bool = False  # mean length of the (horizontal, vertical) difference instead of mean absolute differences
    relative: bool = False
    summed: bool = False  # sum over pixels and channels instead of their mean, as in published formulas
    smooths: ClassVar[bool] = True

    def __call__(self, guess: Guess) -> Tensor:
        images = guess.images
        if self.relative:
            images = images * (CONTRAST / (images.flatten(-3).var(-1) + 1e-6).sqrt())[..., None, None, None]
        if self.summed:
            across, down = images.diff(dim=-1).abs(), images.diff(dim=-2).abs()
            return self.weight * (across.flatten(1).sum(1) + down.flatten(1).sum(1))
        if not self.isotropic:
            differences: Tensor = AbsoluteDifferences.apply(images)
            return self.weight * differences
        across = images[..., :, 1:] - images[..., :, :-1]
        down = images[..., 1:, :] - images[..., :-1, :]
        length = (across[..., :-1, :].square() + down[..., :, :-1].square() + 1e-12).sqrt().flatten(1)
        return self.weight * (length.mean(1) if length.shape[1] else length.sum(1))


@dataclass(frozen=True, kw_only=True)
class ImageNorm:
    """Mean over the batch of the Euclidean norm of an image (GradInversion, Yin et al. 2021)."""

    weight: float = 1e-6

    def __call__(self, guess: Guess) -> Tensor:
        return self.weight * (guess.images.flatten(2).square().sum(2) + 1e-12).sqrt().mean(1)


@dataclass(frozen=True, kw_only=True)
class ColorRange:
    """Penalty on pixels outside [0, 1]: their mean squared distance."""

    weight: float = 1e-2

    def __call__(self, guess: Guess) -> Tensor:
        return self.weight * (guess.images - guess.images.clamp(0, 1)).square().flatten(1).mean(1)


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics:
    """Distance of the guess's batch statistics from the running ones (GradInversion, Yin et al. 2021, R_BN).

    Sum over layers of ``||mean - usual mean|| + ||variance - usual variance||``, times ``first`` for the first layer.
    """

    weight: float = 0.1
    first: float = 10.0

    def __call__(self, guess: Guess) -> Tensor:
        penalty = guess.images.new_zeros(len(guess.images))
        for number, layer in enumerate(guess.batch_statistics()):
            distance = _length(layer.mean - layer.usual_mean) + _length(layer.variance - layer.usual_variance)
            penalty = penalty + (self.first if number == 0 else 1.0) * distance
        return self.weight * penalty


@dataclass(frozen=True, kw_only=True)
class GroupConsistency:
    """Distance of images from their mean over all attempts at a victim, a constant (Yin et al. 2021, R_group)."""

    weight: float = 1e-2

    def __call__(self, guess: Guess) -> Tensor:
        apart = guess.images.reshape(-1, guess.attempts, *guess.images.shape[1:])
        return self.weight * _length((apart - apart.mean(1, keepdim=True).detach()).flatten(0, 1).flatten(1))


def _length(vectors: Tensor) -> Tensor:
    return (vectors.square().sum(1) + 1e-12).sqrt()


def batch_statistics(model: nn.Module, images: Tensor, own: Tensors = MappingProxyType({})) -> list[BatchStatistics]:
    """Return the statistics in each batch-norm layer of ``model`` for images (V, B, C, H, W) of V victims.

    ``own``: statistics (V, C) of the victims' batches, by buffer name; if given, layers normalize by them.
    """
    layers, blocks = _normalizing(model), list(images) if own else [images.flatten(0, 1)]
    calls = list[ModuleCall]()
    for row, block in enumerate(blocks if layers else ()):
        with entering(layers) as entered:
            functional_call(model, {name: value[row] for name, value in own.items()}, (block,))
        calls += entered
    found = []
    for place, call in enumerate(calls[: len(calls) // len(blocks)]):
        inputs = torch.cat([each.inputs for each in calls[place :: len(calls) // len(blocks)]])
        usual = [own.get(f"{call.name}.{kind}", getattr(call.module, kind)) for kind in _RUNNING]
        channels = inputs.reshape(len(images), -1, *inputs.shape[1:]).transpose(1, 2).flatten(2)
        found.append(BatchStatistics(channels.mean(2), channels.var(2, correction=0), *usual))
    return found


_RUNNING = ("running_mean", "running_var")
_LEAST_SHARE = 1e-3  # least momentum; below it, rounding of the running statistics hides the batch's


def _normalizing(model: nn.Module) -> dict[str, nn.Module]:
    norms = nn.modules.batchnorm._BatchNorm
    return {name: m for name, m in model.named_modules() if isinstance(m, norms) and m.track_running_stats}


@torch.no_grad()
def uploaded_statistics(observation: Observation) -> Tensors:
    """Infer the batch's mean and variance (C,), by buffer name, from the running statistics sent and uploaded.

    The result is empty unless the client took one step in training mode, without a known defense. See :func:`of_batch`.
    """
    plan, size, state = observation.plan, observation.upload.num_examples, observation.assumed()
    names = {f"{layer}.{kind}" for layer in _normalizing(observation.model) for kind in _RUNNING}
    one_step = plan.shares == "gradient" or number_of_steps(size, plan) == 1
    known = plan.batch_norm == "train" and one_step and not observation.knowledge.defense
    if not names or not known or not names <= observation.upload.buffers.keys():
        return {}
    evaluating, device = replace(plan, batch_norm="eval"), next(iter(state.parameters.values())).device
    model = frozen_copy(observation.model, state, evaluating, device=device, dtype=torch.float32)
    with entering(_normalizing(model)) as calls:
        model(torch.zeros(size, *observation.input_shape, device=device))
    found = [of_batch(observation, each.name, each.inputs.numel() // each.inputs.shape[1]) for each in calls]
    joined = {name: value for each in found for name, value in each.items()}
    return joined if len(joined) == len(_RUNNING) * len(calls) else {}


def of_batch(observation: Observation, layer: str, values: int) -> Tensors:
    """Infer a batch's mean and variance (C,) at ``layer``, by buffer name, from running statistics sent and uploaded.

    ``values``: number of the batch's elements for each channel of ``layer``. The result is empty if the layer's
    momentum is too small, or statistics are missing, not finite or of another shape.
    """
    sent, uploaded = observation.assumed().buffers, observation.upload.buffers
    factors = {f"{layer}.running_mean": 1.0, f"{layer}.running_var": (values - 1) / values}
    if any(name not in sent or name not in uploaded or uploaded[name].shape != sent[name].shape for name in factors):
        return {}
    share = getattr(observation.model.get_submodule(layer), "momentum", None)
    share = 1 / (float(sent[f"{layer}.num_batches_tracked"]) + 1) if share is None else share
    if share < _LEAST_SHARE:
        return {}
    found = {
        name: factor * (uploaded[name].double() - (1 - share) * sent[name].double()) / share
        for name, factor in factors.items()
    }
    found[f"{layer}.running_var"].clamp_(min=0)  # rounding makes a variance of 0 negative
    return found if all(bool(value.isfinite().all()) for value in found.values()) else {}
