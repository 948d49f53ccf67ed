"""A Wasserstein critic of labelled images, trained on one part of a client's examples."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.defenses.condensation.generator import Generator
from fl_privacy.metrics.labels import hard_labels
from fl_privacy.models import build_model
from fl_privacy.types import Batch

_PENALTY = 10.0
"""Weight of the gradient penalty (Gulrajani et al. 2017)."""


class CriticNet(nn.Module):
    """Two strided convolutions and a score for each class."""

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, width: int) -> None:
        super().__init__()
        side = (image_size + 3) // 4
        self.first = nn.Conv2d(in_channels, width, 3, 2, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.end = nn.Linear(2 * width * side**2, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(B, C, H, W) and (B,) -> scores (B,)."""
        hidden = F.leaky_relu(self.second(F.leaky_relu(self.first(images), 0.2)), 0.2)
        scores: Tensor = self.end(hidden.flatten(1)).gather(1, labels[:, None]).squeeze(1)
        return scores


class Critic:
    """Judges by the examples it was given.

    Args:
        own: these; there may be none.
        num_classes: K.
        rng: of its initial values.
        width: of the network.
        lr: of Adam.
    """

    def __init__(self, own: Batch, num_classes: int, rng: torch.Generator, *, width: int, lr: float) -> None:
        self._images, self._labels = own.inputs, hard_labels(own.labels)
        network = build_model(
            CriticNet,
            seed=int(torch.randint(2**62, (1,), generator=rng, device=rng.device)),
            in_channels=own.inputs.shape[1],
            image_size=own.inputs.shape[2],
            num_classes=num_classes,
            width=width,
        )
        self._network = network.to(own.inputs.device)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=lr, betas=(0.5, 0.9))

    def train(self, generator: Generator, batch_size: int, rng: torch.Generator) -> None:
        """One step: its own examples up, generated ones of the same classes down."""
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
        """(B, C, H, W) of minus the score of each image, which a generator descends."""
        leaf = images.detach().requires_grad_()
        (slope,) = torch.autograd.grad(-self._network(leaf, labels).sum(), leaf)
        return slope
