"""DP-MERF: images of a generator that knows no more of the client than a noised mean of random features."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses.condensation.classes import exchanging, of_every_class
from fl_privacy.defenses.condensation.generator import drawn_set, fresh_generator
from fl_privacy.defenses.defense import Defense, LocalData
from fl_privacy.defenses.noise.mechanism import sample_noise
from fl_privacy.defenses.privacy.accountants import noise_multiplier_for
from fl_privacy.effects import Part, PrivateRelease
from fl_privacy.metrics.matching import hard_labels
from fl_privacy.progress import counted
from fl_privacy.types import Batch


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
) -> Defense:
    """Train on images of a generator fitted to the noised mean of random features of the client's (Harder et al. 2021).

    The sum over examples of random Fourier features times the one-hot label has sensitivity 1; noise on it, added
    once, gives each example (epsilon, delta)-differential privacy against everything that is made of it later. The
    number of examples counts as public.

    Args:
        images_per_class: of every class.
        epsilon: budget of one example, above 0.
        delta: in (0, 1).
        features: of the kernel mean, an even number.
        bandwidth: of the Gaussian kernel, as a share of the square root of the number of pixels.
        iterations: of the generator's training.
        lr: of Adam.
        batch_size: generated images in an iteration.
        width: of the generator.
    """
    settings = dict(locals())
    for name, value in (("images_per_class", images_per_class), ("batch_size", batch_size), ("features", features)):
        checks.whole(f"defense.{name}", value, at_least=2 if name == "features" else 1, example=100)
    checks.number("defense.bandwidth", bandwidth, above=0, example=0.35)
    checks.whole("defense.iterations", iterations, at_least=0, example=500)
    checks.number("defense.lr", lr, above=0, example=0.01)
    checks.whole("defense.width", width, at_least=2, example=16)
    multiplier = noise_multiplier_for(epsilon=epsilon, sample_rate=1.0, steps=1, delta=delta)

    def make(batch: Batch, data: LocalData) -> Batch:
        rng, device = data.rng, batch.inputs.device
        pixels = batch.inputs[0].numel()
        frequencies = torch.randn(features // 2, pixels, generator=rng, device=rng.device).to(device)
        frequencies = frequencies / (bandwidth * math.sqrt(pixels))
        labels = hard_labels(batch.labels)
        total = feature_sum(batch.inputs, labels, frequencies, data.num_classes)
        noise = sample_noise(total, "gaussian", 1.0, rng)
        wanted = (total + multiplier * noise) / len(batch)
        network = fresh_generator(batch, data.num_classes, rng, width=width)
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
    return exchanging(part, make, outcome=of_every_class(images_per_class))


def feature_sum(images: Tensor, labels: Tensor, frequencies: Tensor, num_classes: int) -> Tensor:
    """(F, K): sum over examples of features, of norm 1, times the one-hot label.

    Args:
        images: (N, C, H, W).
        labels: (N,).
        frequencies: (F / 2, C H W).
        num_classes: K.
    """
    phases = images.flatten(1) @ frequencies.T
    features = torch.cat([phases.cos(), phases.sin()], 1) / math.sqrt(len(frequencies))
    return features.T @ F.one_hot(labels, num_classes).to(features)
