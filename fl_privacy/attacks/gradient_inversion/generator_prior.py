"""Search for images among a generator's outputs, by its latents or inner features."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.settings import ImageSource, Shape, VictimContext
from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.generator import ImageGenerator, Provenance, TrainedGenerator, find_generator

Penalty = Literal["kl", "norm"]
"""``kl``: divergence from N(0, 1) of a normal fitted to the latent's entries; ``norm``: their mean square."""

LATENT = -1  # index of the input among a generator's layers


@dataclass(frozen=True)
class NamedGenerator:
    """A generator that is loaded on first use; ``path``: its file, or ``faces`` for the packaged one."""

    path: str | None

    def __call__(
        self, image: Sequence[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> TrainedGenerator:
        asked = tuple(image), torch.device(device), dtype
        if asked not in self._found:
            self._found[asked] = find_generator(self.path, *asked)
        return self._found[asked]

    @cached_property
    def _found(self) -> dict[tuple[tuple[int, ...], torch.device, torch.dtype], TrainedGenerator]:
        return {}

    def __reduce__(self) -> tuple[type["NamedGenerator"], tuple[str | None]]:
        return NamedGenerator, (self.path,)


@dataclass(frozen=True, kw_only=True)
class Generated(ImageSource):
    """Source of images that a trained generator makes, B for each victim.

    Variables are latents (GGL, Li et al. 2022), or changes of a layer's output within an l1 ball (GIFD, Fang et al.
    2023). ``deeper``: number of later layers whose outputs are then optimized, one after another.
    """

    generator: NamedGenerator
    weight: float = 0.0  # weight of the penalty on latents
    penalty_kind: Penalty = "kl"
    layer: int = LATENT  # layer whose output is optimized; ``LATENT`` for the input
    deeper: int = 0
    reach: float = 0.0  # radius of the ball, in shares of the l1 norm of an image's features

    def size(self, shape: Shape) -> int:
        network = self.generator(shape[1:]).network
        if self.layer == LATENT:
            return shape[0] * network.shape.latent
        return shape[0] * int(torch.Size(network.features_shape(self.layer)).numel())

    def start(self, context: VictimContext) -> Tensor:
        known, asked = self.generator(context.shape[1:]).network.shape.num_classes, context.observation.num_classes
        if known not in (0, asked):
            raise UserError(
                f"The generator {self.generator.path} is expected to know the {asked} classes of the model, or none,"
                f" but knows {known}; train one with conditional=false."
            )
        return torch.randn(self.size(context.shape), generator=context.generator)

    def held(self, context: VictimContext) -> Tensor:
        return torch.zeros(0)

    def images(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        network = self._network(variables, shape)
        if self.layer == LATENT:
            made: Tensor = network(variables.reshape(-1, network.shape.latent), labels.flatten(0, 1))
        else:
            features = (held + variables).reshape(-1, *network.features_shape(self.layer))
            made = network.through(features, after=self.layer)
        return made.reshape(len(variables), *shape)

    def penalty(self, variables: Tensor, shape: Shape) -> Tensor:
        if not self.weight or self.layer != LATENT:
            return variables.new_zeros(len(variables))
        latents = variables.reshape(len(variables), shape[0], -1)
        square = latents.square().mean(2)
        if self.penalty_kind == "norm":
            return self.weight * square.mean(1)
        mean = latents.mean(2)
        variance = square - mean.square() + 1e-10
        return self.weight * (mean.square() + variance - 1 - variance.log()).mean(1) / 2

    def confined(self, variables: Tensor, held: Tensor, shape: Shape) -> Tensor:
        if self.layer == LATENT:
            return variables
        apart = variables.reshape(len(variables) * shape[0], -1)
        return onto_l1_ball(apart, self.reach * held.reshape(apart.shape).abs().sum(1)).reshape(variables.shape)

    @torch.no_grad()
    def following(
        self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape
    ) -> tuple[ImageSource, Tensor, Tensor] | None:
        network = self._network(variables, shape)
        left = min(self.deeper, network.depth - 2 - self.layer)
        if left <= 0:
            return None
        if self.layer == LATENT:
            features = network.features(variables.reshape(-1, network.shape.latent), labels.flatten(0, 1))
        else:
            features = (held + variables).reshape(-1, *network.features_shape(self.layer))
            features = network.through(features, after=self.layer, until=self.layer + 1)
        features = features.reshape(len(variables), -1)
        return replace(self, layer=self.layer + 1, deeper=left - 1), torch.zeros_like(features), features

    @property
    def stages(self) -> int:
        return 1 + self.deeper

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        return self.generator(image).provenance

    def _network(self, like: Tensor, shape: Shape) -> ImageGenerator:
        return self.generator(shape[1:], like.device, like.dtype).network


def onto_l1_ball(vectors: Tensor, radius: Tensor) -> Tensor:
    """Project N ``vectors`` (N, n) onto l1 balls of ``radius`` (N,) >= 0 (Duchi et al. 2008, Figure 1)."""
    size = vectors.abs()
    falling = size.sort(1, descending=True).values
    excess = falling.cumsum(1) - radius[:, None]
    counts = torch.arange(1, vectors.shape[1] + 1, device=vectors.device)
    last = (falling * counts > excess).sum(1).clamp_min(1) - 1
    threshold = excess.gather(1, last[:, None]).clamp_min(0) / (last[:, None] + 1)
    shrunk = vectors.sign() * (size - threshold).clamp_min(0)
    return torch.where(size.sum(1, keepdim=True) <= radius[:, None], vectors, shrunk)


_SMALLEST = 4  # least side of the network's input in pixels


@dataclass(frozen=True, kw_only=True)
class Untrained(ImageSource):
    """Source of images that an untrained decoder makes (Ulyanov et al. 2018; CI-Net, Zhang et al. 2023).

    All images of a victim come from one decoder with ``width`` channels, whose input is fixed noise. Its weights are
    proportional to w + ``unit`` x, where w is drawn from N(0, 1) and the variables x start at 0.
    """

    width: int = 32
    unit: float = 0.1

    def size(self, shape: Shape) -> int:
        return sum(self._sizes(shape))

    def start(self, context: VictimContext) -> Tensor:
        return torch.zeros(self.size(context.shape))

    def held(self, context: VictimContext) -> Tensor:
        shape = context.shape
        noise = torch.randn(shape[0] * self._input_size(shape), generator=context.generator)
        drawn = [torch.randn(math.prod(kernel), generator=context.generator) for kernel in self._kernels(shape)]
        biases = [torch.zeros(kernel[0]) for kernel in self._kernels(shape)]
        return torch.cat([noise, *(part for pair in zip(drawn, biases, strict=True) for part in pair)])

    def images(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        victims, number, (height, width) = len(variables), shape[0], shape[2:]
        noise, drawn = torch.split(held, [number * self._input_size(shape), variables.shape[1]], 1)
        pieces = torch.split(drawn + self.unit * variables, self._sizes(shape), 1)
        kernels, sides = self._kernels(shape), self._sides(shape)
        # victims side by side among the channels, each with its own group of filters
        found = noise.reshape(victims, number, self.width, *sides[0]).transpose(0, 1).flatten(1, 2)
        for step, kernel in enumerate(kernels):
            last = step == len(kernels) - 1
            if not last:
                found = F.interpolate(found, size=sides[step + 1], mode="nearest")
            weight = math.sqrt((1 if last else 2) / math.prod(kernel[1:])) * pieces[2 * step].reshape(-1, *kernel[1:])
            found = F.conv2d(found, weight, pieces[2 * step + 1].flatten(), padding=kernel[-1] // 2, groups=victims)
            if not last:
                # normalize (B, V C, H, W) to mean 0 and variance 1 over the channels and pixels of each image
                grouped = found.reshape(len(found), victims, -1)
                variance, mean = torch.var_mean(grouped, 2, keepdim=True, correction=0)
                found = F.leaky_relu(((grouped - mean) * (variance + 1e-5).rsqrt()).reshape(found.shape), 0.1)
        return found.sigmoid().reshape(number, victims, shape[1], height, width).transpose(0, 1)

    def _sides(self, shape: Shape) -> list[tuple[int, int]]:
        sides = [(int(shape[2]), int(shape[3]))]
        while min(sides[0]) // 2 >= _SMALLEST:
            sides.insert(0, (-(-sides[0][0] // 2), -(-sides[0][1] // 2)))
        return [sides[0], *sides] if len(sides) == 1 else sides

    def _kernels(self, shape: Shape) -> list[tuple[int, int, int, int]]:
        hidden = [(self.width, self.width, 3, 3) for _ in pairwise(self._sides(shape))]
        return [*hidden, (int(shape[1]), self.width, 1, 1)]

    def _sizes(self, shape: Shape) -> list[int]:
        return [size for kernel in self._kernels(shape) for size in (math.prod(kernel), kernel[0])]

    def _input_size(self, shape: Shape) -> int:
        height, width = self._sides(shape)[0]
        return self.width * height * width
