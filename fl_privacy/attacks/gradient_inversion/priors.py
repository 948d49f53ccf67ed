"""Priors of natural images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.layer_statistics import AbsoluteDifferences
from fl_privacy.models.gradients.hooks import entering


@dataclass(frozen=True, eq=False)
class BatchStatistics:
    """The guess's (V, C) and the running (C,) statistics in a batch-norm layer."""

    mean: Tensor
    variance: Tensor
    usual_mean: Tensor
    usual_variance: Tensor


@dataclass(frozen=True, eq=False)
class Guess:
    """The input of a prior: ``images`` (V, B, C, H, W), before any assumed transformation.

    ``attempts`` neighboring rows belong to the same victim; ``batch_statistics`` computes those of transformed images.
    """

    images: Tensor
    attempts: int
    batch_statistics: Callable[[], Sequence[BatchStatistics]]


Prior = Callable[[Guess], Tensor]
"""Guess -> weighted penalty (V,), whose attribute ``smooths`` is ``True`` if it makes neighboring pixels alike."""


CONTRAST = 0.25  # typical standard deviation of a photograph's pixels in [0, 1]; CIFAR-10's are between 0.24 and 0.26


@dataclass(frozen=True, kw_only=True)
class TotalVariation:
    """Total variation: the mean absolute (or Euclidean) difference of neighboring pixels.

    Attributes:
        relative: value at a photograph's contrast (:data:`CONTRAST`), for models that normalize by the batch and hardly
            see contrast, so that faint images would count as smooth.
    """

    weight: float = 1e-4
    isotropic: bool = False  # mean length of the (horizontal, vertical) difference instead of both mean absolute ones
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
    """Mean squared distance of the pixels to [0, 1]."""

    weight: float = 1e-2

    def __call__(self, guess: Guess) -> Tensor:
        return self.weight * (guess.images - guess.images.clamp(0, 1)).square().flatten(1).mean(1)


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics:
    """Distance of the batch statistics of the guess to the running ones (GradInversion, Yin et al. 2021, R_BN).

    Sum over layers of ``||mean - usual mean|| + ||variance - usual variance||``, ``first`` times for the first layer; 0
    without batch norm.
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
    """Distance to the mean image of all attempts at the victim (GradInversion, Yin et al. 2021, R_group).

    The current mean is not differentiated.
    """

    weight: float = 1e-2

    def __call__(self, guess: Guess) -> Tensor:
        apart = guess.images.reshape(-1, guess.attempts, *guess.images.shape[1:])
        return self.weight * _length((apart - apart.mean(1, keepdim=True).detach()).flatten(0, 1).flatten(1))


def _length(vectors: Tensor) -> Tensor:
    return (vectors.square().sum(1) + 1e-12).sqrt()


def batch_statistics(model: nn.Module, images: Tensor) -> list[BatchStatistics]:
    """Return the statistics in every batch-norm layer of ``model`` for images (V, B, C, H, W)."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    }
    with entering(layers) as calls:
        if layers:
            model(images.flatten(0, 1))
    found = []
    for call in calls:
        usual_mean, usual_variance = call.module.running_mean, call.module.running_var
        assert isinstance(usual_mean, Tensor) and isinstance(usual_variance, Tensor)
        channels = call.inputs.reshape(len(images), -1, *call.inputs.shape[1:]).transpose(1, 2).flatten(2)
        found.append(BatchStatistics(channels.mean(2), channels.var(2, correction=0), usual_mean, usual_variance))
    return found
