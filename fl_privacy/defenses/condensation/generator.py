"""A small generator of labelled images, from noise and a class, and the set that is drawn of it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.defenses.condensation.network import fresh_network
from fl_privacy.types import Batch

_COARSE = 4
"""The first feature map has a quarter of the image's side."""

_NOISE = 10
"""Length of the noise, as in DP-MERF and GS-WGAN."""


class Generator(nn.Module):
    """A linear layer onto a coarse map, then two doublings of its side with convolutions.

    Args:
        in_channels: C of the images.
        image_size: their height and width.
        num_classes: K.
        noise: length of the noise.
        width: channels of the coarse map.
    """

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, noise: int, width: int) -> None:
        super().__init__()
        self.noise, self.num_classes, self.image_size = noise, num_classes, image_size
        self.side, self.width = -(-image_size // _COARSE), width
        self.start = nn.Linear(noise + num_classes, width * self.side**2)
        self.middle = nn.Conv2d(width, width // 2, 5, padding=2)
        self.end = nn.Conv2d(width // 2, in_channels, 5, padding=2)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """(B, noise) and (B,) -> images (B, C, H, W) in [0, 1]."""
        codes = torch.cat([noise, F.one_hot(labels, self.num_classes).to(noise)], 1)
        hidden = F.relu(self.start(codes)).reshape(len(noise), self.width, self.side, self.side)
        hidden = F.relu(self.middle(F.interpolate(hidden, scale_factor=2, mode="bilinear")))
        images: Tensor = torch.sigmoid(self.end(F.interpolate(hidden, scale_factor=2, mode="bilinear")))
        return images[..., : self.image_size, : self.image_size]

    def draw(self, labels: Tensor, rng: torch.Generator) -> Tensor:
        """(B, C, H, W) of the classes ``labels``."""
        noise = torch.randn(len(labels), self.noise, generator=rng, device=rng.device).to(labels.device)
        images: Tensor = self(noise, labels)
        return images

    def draw_any(self, number: int, rng: torch.Generator) -> Batch:
        """So many images of random classes."""
        labels = torch.randint(self.num_classes, (number,), generator=rng, device=rng.device)
        labels = labels.to(self.start.weight.device)
        return Batch(self.draw(labels, rng), labels)


def fresh_generator(batch: Batch, num_classes: int, rng: torch.Generator, *, width: int) -> Generator:
    """For images like those of ``batch``, with initial values drawn from ``rng``."""
    return fresh_network(Generator, batch.inputs, num_classes, rng, noise=_NOISE, width=width)


def drawn_set(generator: Generator, images_per_class: int, rng: torch.Generator) -> Batch:
    """So many images of every class: which classes the client holds is not told."""
    device = generator.start.weight.device
    labels = torch.arange(generator.num_classes, device=device).repeat_interleave(images_per_class)
    with torch.no_grad():
        images = generator.draw(labels, rng)
    return Batch((images * 255).round() / 255, labels)
