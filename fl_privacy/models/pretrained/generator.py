"""Image generator and discriminator (DCGAN) for attacks, and the provenance of its training data."""

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.errors import UserError

SMALLEST_MAP = 4
"""Least side of a feature map in pixels."""

MOST_SIDE = 512
MOST_FILTERS = 4096


@dataclass(frozen=True, kw_only=True)
class GeneratorShape:
    """Architecture of a generator.

    Attributes:
        channels: C of the images.
        size: height and width of the images, a multiple of 4 such as 28, 32 or 64.
        width: filters of the last but one layer; each earlier layer has twice as many.
        num_classes: K; 0 for a generator without classes.
    """

    channels: int
    size: int
    latent: int = 128
    width: int = 48
    num_classes: int = 0
    embedding: int = 32

    def __post_init__(self) -> None:
        checks.whole("channels", self.channels, at_least=1, at_most=64, example=3)
        checks.whole("size", self.size, at_least=8, at_most=MOST_SIDE, example=32)
        if self.size % 4:
            raise UserError(
                f"A generator's images are expected to be a multiple of 4 wide, but got {self.size}; try 32."
            )
        checks.whole("latent", self.latent, at_least=1, at_most=MOST_FILTERS, example=128)
        checks.whole("width", self.width, at_least=1, at_most=MOST_FILTERS, example=48)
        checks.whole("num_classes", self.num_classes, at_least=0, at_most=1 << 16, example=10)
        checks.whole("embedding", self.embedding, at_least=1, at_most=MOST_FILTERS, example=32)

    @property
    def smallest(self) -> int:
        """Return the side of the first feature map: 7 for 28, 4 for 32 and 64."""
        side = self.size
        while side % 2 == 0 and side // 2 >= SMALLEST_MAP:
            side //= 2
        return side

    @property
    def filters(self) -> list[int]:
        doublings = (self.size // self.smallest).bit_length() - 1
        return [self.width << step for step in reversed(range(doublings))]

    @property
    def image(self) -> tuple[int, int, int]:
        return self.channels, self.size, self.size

    def plain(self) -> dict[str, int]:
        return asdict(self)


class ImageGenerator(nn.Module):
    """Generator of DCGAN (Radford et al. 2016), from latents and classes, if any, to images.

    A transposed convolution spreads the latent over the smallest map; each later one doubles the side. Batch norm and
    ReLU follow all but the last, tanh the last. A class embedding is appended to the latent.
    """

    def __init__(self, shape: GeneratorShape) -> None:
        super().__init__()
        self.shape = shape
        first, *_ = filters = shape.filters
        inputs = shape.latent + (shape.embedding if shape.num_classes else 0)
        self.classes = nn.Embedding(shape.num_classes, shape.embedding) if shape.num_classes else None
        layers: list[nn.Module] = [_block(nn.ConvTranspose2d(inputs, first, shape.smallest, bias=False), first)]
        layers += [_block(_doubling(inner, outer), outer) for inner, outer in pairwise(filters)]
        layers.append(nn.Sequential(_doubling(filters[-1], shape.channels), nn.Tanh()))
        self.layers = nn.ModuleList(layers)
        for module in self.modules():
            if isinstance(module, nn.ConvTranspose2d):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)

    @property
    def depth(self) -> int:
        """Return the number of layers; the outputs of layer k, 0 <= k < depth - 1, can be optimized."""
        return len(self.layers)

    def features_shape(self, layer: int) -> tuple[int, int, int]:
        """Return the output shape (C, H, W) of ``layer``."""
        side = self.shape.smallest << layer
        return self.shape.filters[layer], side, side

    def features(self, latents: Tensor, labels: Tensor | None) -> Tensor:
        """Return the outputs (N, C, H, W) of layer 0 for latents (N, Z) and labels (N,) or probabilities (N, K)."""
        if self.classes is not None:
            if labels is None:
                raise UserError(
                    "A generator that knows classes is expected to be told them, but got none; give labels."
                )
            told = self.classes(labels) if labels.dim() == 1 else labels.to(latents.dtype) @ self.classes.weight
            latents = torch.cat([latents, told], 1)
        found: Tensor = self.layers[0](latents[:, :, None, None])
        return found

    def through(self, features: Tensor, *, after: int, until: int | None = None) -> Tensor:
        """Return the outputs of layer ``until`` from those of ``after``; the last gives images in [0, 1]."""
        last = self.depth - 1 if until is None else until
        for layer in list(self.layers)[after + 1 : last + 1]:
            features = layer(features)
        return (features + 1) / 2 if last == self.depth - 1 else features

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map latents (N, Z) and labels (N,) or (N, K) to images (N, C, H, W) in [0, 1]."""
        return self.through(self.features(latents, labels), after=0)


class ImageDiscriminator(nn.Module):
    """Discriminator of strided convolutions with spectral norm (Miyato et al. 2018).

    Classes enter by projection (Miyato and Koyama 2018): their embedding's product with the last features.
    """

    def __init__(self, shape: GeneratorShape) -> None:
        super().__init__()
        filters = [shape.channels, *reversed(shape.filters)]
        normed = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(
            normed(nn.Conv2d(inner, outer, 4, stride=2, padding=1)) for inner, outer in pairwise(filters)
        )
        size = filters[-1] * shape.smallest**2
        self.head = normed(nn.Linear(size, 1))
        self.classes = normed(nn.Embedding(shape.num_classes, size)) if shape.num_classes else None

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Score images (N, C, H, W) in [0, 1] with labels (N,): (N,), above 0 for real."""
        found = 2 * images - 1
        for layer in self.layers:
            found = F.leaky_relu(layer(found), 0.1)
        found = found.flatten(1)
        scores: Tensor = self.head(found).squeeze(1)
        if self.classes is not None and labels is not None:
            scores = scores + (self.classes(labels) * found).sum(1)
        return scores


def _block(convolution: nn.ConvTranspose2d, filters: int) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(filters), nn.ReLU())


def _doubling(inner: int, outer: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(inner, outer, 4, stride=2, padding=1, bias=False)


SIDE = 8
"""Side of a fingerprint in pixels."""

ALIKE = 3.0
"""Root mean square distance of fingerprints, in gray levels of 255, up to which two images count as the same: JPEG is
below, different images are above (``experiments/generative_prior.py seen``)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Provenance:
    """Training data of a generator.

    Attributes:
        fingerprints: (N, 64) uint8 of its images; empty if unknown.
    """

    data: str
    split: str
    images: int
    seed: int = 0
    steps: int = 0
    fingerprints: Tensor = field(default_factory=lambda: torch.zeros(0, SIDE * SIDE, dtype=torch.uint8))

    def words(self) -> str:
        return f"{self.data}, split {self.split}, {self.images:,} images"

    def header(self) -> str:
        fields = asdict(self)
        del fields["fingerprints"]
        return json.dumps(fields)

    def seen(self, images: Tensor) -> Tensor:
        """Return the mask (N,) of ``images`` (N, C, H, W), uint8 or in [0, 1], seen in training, up to re-encoding."""
        if not len(self.fingerprints):
            return torch.zeros(len(images), dtype=torch.bool)
        known, asked = self.fingerprints.float(), image_fingerprints(images).float()
        nearest = torch.cat([torch.cdist(part, known).amin(1) for part in torch.split(asked, 256)])
        return nearest / SIDE <= ALIKE


def image_fingerprints(images: Tensor) -> Tensor:
    """Return the mean gray of 8 by 8 parts of each of ``images`` (N, C, H, W), uint8 or in [0, 1]: (N, 64) uint8."""
    parts = []
    for part in torch.split(images, 4096):
        values = part.float() if part.dtype == torch.uint8 else 255 * part.float()
        parts.append(F.adaptive_avg_pool2d(values.mean(1, keepdim=True), SIDE).flatten(1).round().clamp(0, 255))
    return torch.cat(parts).to(torch.uint8) if parts else torch.zeros(0, SIDE * SIDE, dtype=torch.uint8)
