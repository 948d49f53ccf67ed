"""GS-WGAN: training on images of a generator that is trained with clipped and noised gradients."""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.defenses import _dp_merf, _dp_noise, dc_dsa_dm, defense, privacy
from fl_privacy.effects import Part, PrivateRelease
from fl_privacy.measure.matching import hard_labels
from fl_privacy.progress import counted
from fl_privacy.types import Batch


def gs_wgan(
    *,
    images_per_class: int = 50,
    epsilon: float = 10.0,
    delta: float = 1e-5,
    critics: int = 50,
    iterations: int = 300,
    critic_steps: int = 2,
    lr: float = 1e-3,
    batch_size: int = 16,
    width: int = 16,
) -> defense.Defense:
    """Train on images of a Wasserstein generator whose gradients are clipped and noised (GS-WGAN, Chen et al. 2020).

    Each iteration draws one of the ``critics``, among which the client's examples are divided. The generator receives
    the gradient of each generated image, clipped to norm 1 and noised. The paper has 1,000 critics, 20,000 iterations.

    Args:
        images_per_class: generated images of every class.
        epsilon: privacy budget of one example, above 0.
        delta: probability in (0, 1).
        critics: number of critics, at least 1.
        iterations: updates of the generator, at least 1.
        critic_steps: updates of the drawn critic before each update of the generator.
        lr: learning rate of Adam, for generator and critics.
        batch_size: images per step.
        width: channels of generator and critics.
    """
    settings = dict(locals())
    for name in ("images_per_class", "critics", "iterations", "critic_steps", "batch_size"):
        checks.whole(f"defense.{name}", settings[name], at_least=1, example=50)
    checks.number("defense.lr", lr, above=0, example=1e-3)
    checks.whole("defense.width", width, at_least=2, example=16)
    multiplier = privacy.mixture_noise_multiplier(epsilon=epsilon, share=1 / critics, steps=iterations, delta=delta)

    def make(batch: Batch, data: defense.LocalData) -> Batch:
        rng, device = data.rng, batch.inputs.device
        generator = _dp_merf.fresh_generator(batch, data.num_classes, rng, width=width)
        optimizer = torch.optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.9))
        part = torch.randint(critics, (len(batch),), generator=rng, device=rng.device).to(device)
        judges: dict[int, Critic] = {}
        for _ in counted("training the generator", range(iterations)):
            number = int(torch.randint(critics, (1,), generator=rng, device=rng.device))
            if number not in judges:
                own = Batch(batch.inputs[part == number], batch.labels[part == number])
                judges[number] = Critic(own, data.num_classes, rng, width=width, lr=lr)
            for _ in range(critic_steps):
                judges[number].train(generator, batch_size, rng)
            made = generator.draw_any(batch_size, rng)
            slope = judges[number].slope(made.inputs.detach(), made.labels)
            optimizer.zero_grad()
            torch.autograd.backward(made.inputs, sanitized(slope, multiplier, rng))
            optimizer.step()
        return _dp_merf.drawn_set(generator, images_per_class, rng)

    effect = PrivateRelease(epsilon=epsilon, delta=delta, noise_multiplier=multiplier)
    part = Part("gs_wgan", {**settings, "noise_multiplier": multiplier}, effect, strength="epsilon")
    return dc_dsa_dm.exchanging(part, make, images_per_class=images_per_class, every_class=True)


def sanitized(slopes: Tensor, multiplier: float, rng: torch.Generator) -> Tensor:
    """Clip each image's gradient in ``slopes`` (B, C, H, W) to norm 1, and add Gaussian noise.

    The standard deviation is ``multiplier`` times the sensitivity 2 sqrt(B), the largest distance of two such batches.
    """
    norms = slopes.flatten(1).norm(dim=1).clamp_min(1).view(-1, 1, 1, 1)
    noise = _dp_noise.sample_noise(slopes, "gaussian", 1.0, rng)
    return cast(Tensor, slopes / norms + 2 * math.sqrt(len(slopes)) * multiplier * noise)


_PENALTY = 10.0  # weight of the gradient penalty (Gulrajani et al. 2017)


class CriticNet(nn.Module):
    """Critic network: two strided convolutions, and a score for each class."""

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, width: int) -> None:
        super().__init__()
        side = (image_size + 3) // 4
        self.first = nn.Conv2d(in_channels, width, 3, 2, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.end = nn.Linear(2 * width * side**2, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.second(F.leaky_relu(self.first(images), 0.2)), 0.2)
        return cast(Tensor, self.end(hidden.flatten(1)).gather(1, labels[:, None]).squeeze(1))


class Critic:
    """One of GS-WGAN's critics, which rate images; it is trained only on the client's examples ``own``, if any."""

    def __init__(self, own: Batch, num_classes: int, rng: torch.Generator, *, width: int, lr: float) -> None:
        self._images, self._labels = own.inputs, hard_labels(own.labels)
        self._network = dc_dsa_dm.fresh_network(CriticNet, own.inputs, num_classes, rng, width=width)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=lr, betas=(0.5, 0.9))

    def train(self, generator: _dp_merf.Generator, batch_size: int, rng: torch.Generator) -> None:
        if not len(self._images):
            return
        chosen = torch.randint(len(self._images), (batch_size,), generator=rng, device=rng.device)
        real, labels = self._images[chosen.to(self._images.device)], self._labels[chosen.to(self._labels.device)]
        with torch.no_grad():
            made = generator.draw(labels, rng)
        share = torch.rand(batch_size, 1, 1, 1, generator=rng, device=rng.device).to(real)
        between = torch.lerp(real, made, share).requires_grad_()
        (slope,) = torch.autograd.grad(self._network(between, labels).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = self._network(made, labels).mean() - self._network(real, labels).mean() + _PENALTY * penalty
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()

    def slope(self, images: Tensor, labels: Tensor) -> Tensor:
        leaf = images.detach().requires_grad_()
        (slope,) = torch.autograd.grad(-self._network(leaf, labels).sum(), leaf)
        return slope
