"""Images of an untrained network whose weights are optimized."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.settings import Blank, ImageSource, Shape

_SMALLEST = 4
"""Least side of the network's input in pixels."""


@dataclass(frozen=True, kw_only=True)
class Untrained(ImageSource):
    """A convolutional decoder for each victim (deep image prior, Ulyanov et al. 2018; CI-Net, Zhang et al. 2023).

    Fixed noise of a few pixels is doubled, convolved, normalized and rectified up to the image's size; convolution and
    sigmoid make colors. A victim's images share the weights ``scale (w + unit x)``, with w from N(0, 1), scale by He et
    al. (2015), and variables x from 0.

    Attributes:
        unit: move of a weight by a variable of 1, in standard deviations.
    """

    width: int = 32
    unit: float = 0.1

    def size(self, shape: Shape) -> int:
        return sum(self._sizes(shape))

    def start(self, blank: Blank) -> Tensor:
        return torch.zeros(self.size(blank.shape))

    def held(self, blank: Blank) -> Tensor:
        """Draw the network's input, then its initial weights, with biases 0."""
        shape = blank.shape
        noise = torch.randn(shape[0] * self._input_size(shape), generator=blank.generator)
        drawn = [torch.randn(math.prod(kernel), generator=blank.generator) for kernel in self._kernels(shape)]
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
            scale = math.sqrt((1 if last else 2) / math.prod(kernel[1:]))
            weight = scale * pieces[2 * step].reshape(-1, *kernel[1:])
            bias = pieces[2 * step + 1].flatten()
            found = F.conv2d(found, weight, bias, padding=kernel[-1] // 2, groups=victims)
            if not last:
                # normalize (B, V C, H, W) to mean 0 and variance 1 over the channels and pixels of each image
                grouped = found.reshape(len(found), victims, -1)
                variance, mean = torch.var_mean(grouped, 2, keepdim=True, correction=0)
                found = F.leaky_relu(((grouped - mean) * (variance + 1e-5).rsqrt()).reshape(found.shape), 0.1)
        images: Tensor = found.sigmoid().reshape(number, victims, shape[1], height, width).transpose(0, 1)
        return images

    def _sides(self, shape: Shape) -> list[tuple[int, int]]:
        """Return (height, width) of the maps, from input to image, each half of the next, rounded up."""
        sides = [(int(shape[2]), int(shape[3]))]
        while min(sides[0]) // 2 >= _SMALLEST:
            sides.insert(0, (-(-sides[0][0] // 2), -(-sides[0][1] // 2)))
        return [sides[0], *sides] if len(sides) == 1 else sides

    def _kernels(self, shape: Shape) -> list[tuple[int, int, int, int]]:
        """Return the shapes of the weights: 3x3 after each doubling, 1x1 for the colors."""
        hidden = [(self.width, self.width, 3, 3) for _ in pairwise(self._sides(shape))]
        return [*hidden, (int(shape[1]), self.width, 1, 1)]

    def _sizes(self, shape: Shape) -> list[int]:
        return [size for kernel in self._kernels(shape) for size in (math.prod(kernel), kernel[0])]

    def _input_size(self, shape: Shape) -> int:
        height, width = self._sides(shape)[0]
        return self.width * height * width
