"""DP-MERF: training on images of a generator fitted to noised random features of the client's images."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.defenses import _dp_noise, dc_dsa_dm, defense, privacy
from fl_privacy.effects import Part, PrivateRelease
from fl_privacy.measure.matching import hard_labels
from fl_privacy.progress import counted
from fl_privacy.types import Batch

_COARSE = 4  # image side divided by that of the first feature map
_NOISE = 10  # length of the noise, as in DP-MERF and GS-WGAN


class Generator(nn.Module):
    """Image generator: a linear layer to ``width`` feature maps, and two convolutions with upsampling."""

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.num_classes, self.image_size = num_classes, image_size
        self.side, self.width = -(-image_size // _COARSE), width
        self.start = nn.Linear(_NOISE + num_classes, width * self.side**2)
        self.middle = nn.Conv2d(width, width // 2, 5, padding=2)
        self.end = nn.Conv2d(width // 2, in_channels, 5, padding=2)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        codes = torch.cat([noise, F.one_hot(labels, self.num_classes).to(noise)], 1)
        hidden = F.relu(self.start(codes)).reshape(len(noise), self.width, self.side, self.side)
        hidden = hidden.contiguous(memory_format=torch.channels_last)  # gradients take half the time on a CPU
        hidden = F.relu(self.middle(F.interpolate(hidden, scale_factor=2, mode="bilinear")))
        images: Tensor = torch.sigmoid(self.end(F.interpolate(hidden, scale_factor=2, mode="bilinear")))
        return images[..., : self.image_size, : self.image_size].contiguous()

    def draw(self, labels: Tensor, rng: torch.Generator) -> Tensor:
        noise = torch.randn(len(labels), _NOISE, generator=rng, device=rng.device).to(labels.device)
        images: Tensor = self(noise, labels)
        return images

    def draw_any(self, number: int, rng: torch.Generator) -> Batch:
        labels = torch.randint(self.num_classes, (number,), generator=rng, device=rng.device)
        labels = labels.to(self.start.weight.device)
        return Batch(self.draw(labels, rng), labels)


def drawn_set(generator: Generator, images_per_class: int, rng: torch.Generator) -> Batch:
    """Generate ``images_per_class`` images, in 256 levels, of every class, also of those that the client lacks."""
    labels = torch.arange(generator.num_classes).repeat_interleave(images_per_class).to(generator.start.weight.device)
    with torch.no_grad():
        images = generator.draw(labels, rng)
    return Batch((images * 255).round() / 255, labels)


def dp_merf(
    *,
    images_per_class: int = 50,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    features: int = 2000,
    bandwidth: float = 0.35,
    iterations: int = 500,
    lr: float = 0.01,
    batch_size: int = 100,
    width: int = 16,
) -> defense.Defense:
    """Train on images of a generator fitted to the client's noised random features (DP-MERF, Harder et al. 2021).

    Noise is added once, to the sum over examples of random Fourier features times the one-hot label. It makes all
    uploads (epsilon, delta)-private for each example. The number of examples is public.

    Args:
        images_per_class: generated images of every class.
        epsilon: privacy budget of one example, above 0.
        delta: probability in (0, 1).
        features: even number of random features.
        bandwidth: bandwidth of the Gaussian kernel, in units of the square root of the number of pixels.
        iterations: training steps of the generator.
        lr: learning rate of the generator's Adam.
        batch_size: generated images per iteration.
        width: channels of the generator.
    """
    settings = dict(locals())
    for name, value in (("images_per_class", images_per_class), ("batch_size", batch_size), ("features", features)):
        checks.whole(f"defense.{name}", value, at_least=2 if name == "features" else 1, example=100)
    checks.number("defense.bandwidth", bandwidth, above=0, example=0.35)
    checks.whole("defense.iterations", iterations, at_least=0, example=500)
    checks.number("defense.lr", lr, above=0, example=0.01)
    checks.whole("defense.width", width, at_least=2, example=16)
    multiplier = privacy.noise_multiplier_for(epsilon=epsilon, sample_rate=1.0, steps=1, delta=delta)

    def make(batch: Batch, data: defense.LocalData) -> Batch:
        rng, device = data.rng, batch.inputs.device
        pixels = batch.inputs[0].numel()
        frequencies = torch.randn(features // 2, pixels, generator=rng, device=rng.device).to(device)
        frequencies = frequencies / (bandwidth * math.sqrt(pixels))
        total = feature_sum(batch.inputs, hard_labels(batch.labels), frequencies, data.num_classes)
        wanted = (total + multiplier * _dp_noise.sample_noise(total, "gaussian", 1.0, rng)) / len(batch)
        network = dc_dsa_dm.fresh_network(Generator, batch.inputs, data.num_classes, rng, width=width)
        optimizer = torch.optim.Adam(network.parameters(), lr=lr)
        for _ in counted("training the generator", range(iterations)):
            made = network.draw_any(batch_size, rng)
            found = feature_sum(made.inputs, made.labels, frequencies, data.num_classes) / batch_size
            optimizer.zero_grad()
            torch.autograd.backward((found - wanted).square().sum())
            optimizer.step()
        return drawn_set(network, images_per_class, rng)

    effect = PrivateRelease(epsilon=epsilon, delta=delta, noise_multiplier=multiplier)
    part = Part("dp_merf", {**settings, "noise_multiplier": multiplier}, effect, strength="epsilon")
    return dc_dsa_dm.exchanging(part, make, images_per_class=images_per_class, every_class=True)


def feature_sum(images: Tensor, labels: Tensor, frequencies: Tensor, num_classes: int) -> Tensor:
    """Return the sum (F, K), over ``images`` (N, C, H, W), of F random Fourier features times one-hot ``labels`` (N,).

    ``frequencies`` are (F / 2, C H W). The features of an image have norm 1.
    """
    phases = images.flatten(1) @ frequencies.T
    features = torch.cat([phases.cos(), phases.sin()], 1) / math.sqrt(len(frequencies))
    return features.T @ F.one_hot(labels, num_classes).to(features)
