"""Models and attacks as a user would write them, named in the tests by ``_target_``."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.defenses import Defense
from fl_privacy.types import Observation


class Net(nn.Module):
    """Takes only what it needs of what is offered."""

    def __init__(self, num_classes: int, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 5, stride=4), nn.Tanh(), nn.Flatten(), nn.LazyLinear(num_classes))
        self.body(torch.zeros(1, 1, 28, 28))

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


def broken_attack(message: str = "no such luck") -> ReconstructionAttack:
    """Make an attack that raises whatever it is given."""

    def attack(observations: Sequence[Observation], **settings: Any) -> Any:
        raise ArithmeticError(message)

    return attack


def one_sided_net(num_classes: int) -> nn.Module:
    """Build a model that no client can train: its loss is not a number."""
    net = Net(num_classes)
    nn.init.constant_(net.body[3].weight, torch.nan)
    return net


def quitter() -> nn.Module:
    """Code that was written as a script."""
    sys.exit(0)


def halved() -> Defense:
    """Says nothing of itself."""
    return Defense(gradient=(lambda tensors, step: {name: tensor / 2 for name, tensor in tensors.items()},))
