"""Parts as a user may have written them, each wrong in its own way."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.defenses import Defense
from fl_privacy.effects import Part
from fl_privacy.types import Batch, Observation, Reconstruction, VictimId


class Unfinished(nn.Module):
    def __init__(self, num_classes: int) -> None:
        raise NotImplementedError("to be written")


class Forgetful(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = {"fc": nn.Linear(784, num_classes)}

    def forward(self, images: Tensor) -> Tensor:
        return self.layers["fc2"](images.flatten(1))


class Silent(nn.Module):
    def forward(self, images: Tensor) -> None:
        return None


class Listing(nn.Module):
    def forward(self, images: Tensor) -> Any:
        return [1, 2, 3]


class Leaving(nn.Module):
    def forward(self, images: Tensor) -> Any:
        sys.exit(0)


class Endless(nn.Module):
    def forward(self, images: Tensor) -> Any:
        return self.forward(images)


def no_model(num_classes: int) -> None:
    return None


def leaving(num_classes: int) -> None:
    sys.exit(0)


def no_defense() -> None:
    return None


def text_defense() -> str:
    return "none"


def broken_defense() -> Defense:
    raise KeyError("strength")


def unprepared_defense() -> Defense:
    def prepare(shape: Sequence[int]) -> None:
        raise IndexError("no such image")

    return Defense(parts=(Part("unprepared"),), prepare=(prepare,))


def text_partition() -> Any:
    return lambda examples, *, num_clients, seed: "everything"


def no_partition() -> Any:
    return lambda examples, *, num_clients, seed: None


def listed_partition() -> Any:
    return lambda examples, *, num_clients, seed: [[0, 1]] * num_clients


def shared_partition() -> Any:
    return lambda examples, *, num_clients, seed: [torch.arange(5)] * num_clients


def distant_partition() -> Any:
    return lambda examples, *, num_clients, seed: [torch.arange(10) + 10**9 + 10 * k for k in range(num_clients)]


def broken_partition() -> Any:
    return lambda examples, *, num_clients, seed: {}["shares"]


def number_partition() -> int:
    return 5


def no_attack() -> None:
    return None


def attack_of(kind: str) -> Any:
    """Make an attack that returns an invalid answer."""

    def attack(observations: Sequence[Observation], **settings: Any) -> Any:
        guess = Batch(torch.zeros(1, *observations[0].input_shape), torch.zeros(1, dtype=torch.int64))
        answers = {
            "nothing": None,
            "a list of nothing": [None] * len(observations),
            "text": "done",
            "too few": [],
            "other names": [Reconstruction(id=VictimId(9, 9), batch=guess) for _ in observations],
        }
        return answers[kind]

    return attack


def leaving_attack() -> Any:
    def attack(observations: Sequence[Observation], **settings: Any) -> Any:
        sys.exit(0)

    return attack
