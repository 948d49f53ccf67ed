"""Transformations that a client may have drawn for its images, done to the guess before its gradient is compared."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fl_privacy.transformations import Policy, Table, apply_policy

Transform = Callable[[Tensor], Tensor]
"""(N, C, H, W) -> the same, differentiable."""


@dataclass(frozen=True, eq=False)
class AssumedTransform:
    """What each guessed image is taken to have gone through.

    Attributes:
        transforms: that there are.
        chosen: (V, B) which of them.
    """

    transforms: Sequence[Transform]
    chosen: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """(V, B, C, H, W) -> the same."""
        flat, chosen = images.flatten(0, 1), self.chosen.flatten()
        rows = [(chosen == number).nonzero().flatten() for number in range(len(self.transforms))]
        changed = [transform(flat[some]) for transform, some in zip(self.transforms, rows, strict=True) if len(some)]
        back = torch.cat(rows).argsort()
        return torch.cat(changed)[back].reshape(images.shape)

    def map(self, change: Callable[[Tensor], Tensor]) -> "AssumedTransform":
        return AssumedTransform(self.transforms, change(self.chosen))


def choose_transforms(number: int, restart: int, size: int, generator: torch.Generator) -> Tensor:
    """(B,) one of ``number`` transforms for each image of a batch of ``size`` in an attempt.

    The attempts at a single image try one after the other; those at a batch draw, since its images differ.
    """
    if size == 1:
        return torch.tensor([restart % number])
    return torch.randint(number, (size,), generator=generator)


def outcomes(policies: Sequence[str], *, table: Table = "paper", by_probability: bool = False) -> tuple[Transform, ...]:
    """Everything that ``policies`` can do to an image: all signs of all of them, each outcome once.

    Args:
        policies: names.
        table: of the operations they number.
        by_probability: whether the client leaves operations out at random.
    """
    found: dict[tuple[Policy, tuple[int, ...]], None] = {}
    for policy in (Policy.parse(name, table) for name in policies):
        kept = [policy]
        if by_probability:
            kept = [
                Policy(part, table)
                for n in range(len(policy.indices) + 1)
                for part in itertools.combinations(policy.indices, n)
            ]
        for one in kept:
            signs = [(1, -1) if operation.signed else (1,) for operation in one.operations]
            found |= dict.fromkeys((one, combination) for combination in itertools.product(*signs))
    return tuple(partial(apply_policy, policy=policy, signs=signs) for policy, signs in found)
