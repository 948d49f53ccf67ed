"""Shared parts of DC, DSA and DM: images by class, siamese augmentation and the condensation network."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.defenses.defense import Defense, LocalData
from fl_privacy.effects import Part
from fl_privacy.measure.matching import hard_labels
from fl_privacy.models import build_model
from fl_privacy.models.layers import require_pixels
from fl_privacy.types import Batch

MIDDLE, SPREAD = 0.5, 0.25  # condensed images are optimized normalized: pixels minus 0.5, over 0.25


Start = Literal["noise", "real"]
"""Initial condensed images: normal noise around the middle of the range, or images of the client."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Examples of one client by class.

    Attributes:
        images: (N, C, H, W) normalized.
        present: (P,) classes of the client.
        first: (P,) place of each class's first example in ``order``.
        counts: (P,) examples of each class.
        order: (N,) examples sorted by class.
    """

    images: Tensor
    present: Tensor
    first: Tensor
    counts: Tensor
    order: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Classes":
        """Split ``batch``, with inputs in [0, 1], into its classes."""
        labels = hard_labels(batch.labels)
        present, counts = torch.unique(labels, return_counts=True)
        first = counts.cumsum(0) - counts
        return cls((batch.inputs - MIDDLE) / SPREAD, present, first, counts, labels.argsort(stable=True))

    def draw(self, number: int, rng: torch.Generator) -> Tensor:
        """Draw images of each class (P, number, C, H, W), with replacement."""
        chance = torch.rand(len(self.present), number, generator=rng, device=rng.device).to(self.images.device)
        return self.images[self.order[self.first.unsqueeze(1) + (chance * self.counts.unsqueeze(1)).long()]]

    def start(self, number: int, how: Start, rng: torch.Generator) -> Tensor:
        """Return the initial condensed images (P, number, C, H, W)."""
        if how == "real":
            return self.draw(number, rng)
        shape = (len(self.present), number, *self.images.shape[1:])
        return torch.randn(shape, generator=rng, device=rng.device).to(self.images)

    def finished(self, images: Tensor) -> Batch:
        """Turn normalized images (P, I, C, H, W) into a batch of 256 levels in [0, 1]."""
        pixels = (MIDDLE + SPREAD * images.detach()).clamp(0, 1)
        return Batch((pixels.flatten(0, 1) * 255).round() / 255, self.present.repeat_interleave(images.shape[1]))


Make = Callable[[Batch, LocalData], Batch]
"""Function from a client's examples to their substitutes."""


def exchanging(part: Part, make: Make, *, images_per_class: int, every_class: bool = False) -> Defense:
    """Build a defense that trains on the result of ``make``, computed once and kept in the client's state as bytes.

    The result has ``images_per_class`` images of every class, or of each class that the client has.
    """
    images, labels = f"{part.name}/images", f"{part.name}/labels"

    def hook(batch: Batch, data: LocalData) -> Batch:
        kept, device = data.state.tensors, batch.inputs.device
        if images not in kept:
            made = make(batch, data)
            kept[images] = (made.inputs * 255).round().to(torch.uint8)
            kept[labels] = made.labels
        return Batch(kept[images].to(device).to(batch.inputs.dtype) / 255, kept[labels].to(device))

    def outcome(labels: Tensor, num_classes: int) -> Tensor:
        classes: Tensor = torch.arange(num_classes) if every_class else torch.unique(labels)
        return classes.repeat_interleave(images_per_class)

    return Defense(parts=(part,), examples=(hook,), outcome=(outcome,))


Augmentation = Callable[[Tensor], Tensor]
"""(..., C, H, W) -> the same, differentiable."""


def siamese(rng: torch.Generator) -> Augmentation:
    """Draw one of color, crop, cutout, flip, scale and rotation, with its parameters (Zhao and Bilen 2021)."""
    kinds = ("color", "crop", "cutout", "flip", "scale", "rotation")
    kind = kinds[int(torch.randint(len(kinds), (1,), generator=rng, device=rng.device))]
    draws = torch.rand(3, generator=rng, device=rng.device)
    return lambda images: _augmented(images, kind, draws)


def siamese_by_class(classes: int, rng: torch.Generator) -> Augmentation:
    """Draw ``siamese`` for each of the ``classes`` in the first dimension, like the authors' code."""
    changes = [siamese(rng) for _ in range(classes)]
    return lambda images: torch.stack([change(of_class) for change, of_class in zip(changes, images, strict=True)])


def _augmented(images: Tensor, kind: str, draws: Tensor) -> Tensor:
    first, second, third = draws.tolist()
    height, width = images.shape[-2:]
    if kind == "color":  # brightness, saturation, contrast
        images = images + (first - 0.5)
        grey = images.mean(-3, keepdim=True)
        images = grey + (images - grey) * (2 * second)
        middle = images.mean((-3, -2, -1), keepdim=True)
        changed: Tensor = middle + (images - middle) * (third + 0.5)
        return changed
    if kind == "crop":
        reach_y, reach_x = round(height / 8), round(width / 8)
        top, left = int(draws[0] * (2 * reach_y + 1)), int(draws[1] * (2 * reach_x + 1))
        return F.pad(images, (reach_x, reach_x, reach_y, reach_y))[..., top : top + height, left : left + width]
    if kind == "cutout":
        top, left = int(draws[0] * (height // 2 + 1)), int(draws[1] * (width // 2 + 1))
        mask = torch.ones(height, width, device=images.device)
        mask[top : top + height // 2, left : left + width // 2] = 0
        return images * mask
    if kind == "flip":
        return images.flip(-1) if first < 0.5 else images
    if kind == "scale":
        matrix = [[1.2 ** (2 * first - 1), 0.0, 0.0], [0.0, 1.2 ** (2 * second - 1), 0.0]]
    else:
        angle = math.radians(15 * (2 * first - 1))
        cosine, sine = math.cos(angle), math.sin(angle)
        matrix = [[cosine, -sine, 0.0], [sine, cosine, 0.0]]
    flat = images.reshape(-1, *images.shape[-3:])
    grid = F.affine_grid(flat.new_tensor(matrix).expand(len(flat), 2, 3), list(flat.shape), align_corners=False)
    return F.grid_sample(flat, grid, align_corners=False).reshape(images.shape)


Network = TypeVar("Network", bound=nn.Module)

_BLOCKS = 3


class InstanceNorm(nn.Module):
    """Instance normalization by plain operations, which can be differentiated twice under ``vmap``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        centered = inputs - inputs.mean((-2, -1), keepdim=True)
        scale = (centered.square().mean((-2, -1), keepdim=True) + 1e-5).rsqrt()
        return centered * scale * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class CondensationNet(nn.Module):
    """Three blocks of convolution, instance norm, ReLU and average pooling, and a linear layer (Zhao et al. 2021).

    Inputs are normalized: pixels minus 0.5, over 0.25.
    """

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, width: int) -> None:
        super().__init__()
        require_pixels("Condensation", image_size, least=2**_BLOCKS)
        side = image_size // 2**_BLOCKS
        layers: list[nn.Module] = []
        for channels in (in_channels, *[width] * (_BLOCKS - 1)):
            layers += [nn.Conv2d(channels, width, 3, padding=1), InstanceNorm(width), nn.ReLU(), nn.AvgPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * side * side, num_classes)

    def embed(self, inputs: Tensor) -> Tensor:
        """Embed images (B, C, H, W) -> (B, D)."""
        embedding: Tensor = self.features(inputs).flatten(1)
        return embedding

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(inputs))
        return logits


def fresh_network(
    kind: type[Network], images: Tensor, num_classes: int, rng: torch.Generator, **options: int
) -> Network:
    """Build a network of ``kind`` for ``images`` (..., C, H, W), initialized from ``rng``."""
    seed, (channels, size, _) = int(torch.randint(2**62, (1,), generator=rng, device=rng.device)), images.shape[-3:]
    network = build_model(kind, seed=seed, in_channels=channels, image_size=size, num_classes=num_classes, **options)
    assert isinstance(network, kind)
    return network.to(images.device)
