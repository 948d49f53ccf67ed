"""Detection of predictable noise: from the number of its round, or from a small seed."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from fl_privacy.dp_check.draws import ROUNDING, ByRound, ManyAtOnce, Mechanism, Neighbors, flattened
from fl_privacy.dp_check.structure import Uncovered
from fl_privacy.errors import UserError

ROUND_LIKE = 10_000_001
"""Round number beyond any training."""


def by_its_round(mechanism: Mechanism, pair: Neighbors) -> list[Uncovered]:
    """Compare the same rounds with and without the unit: noise that follows from the round's number cancels."""
    if not isinstance(mechanism, ByRound):
        return []
    try:
        sides = [
            torch.stack([flattened(mechanism.at(given, ROUND_LIKE + number)) for number in range(4)])
            for given in (pair.first, pair.second)
        ]
    except UserError:  # a mod may refuse to answer a round again
        return []
    difference = sides[0] - sides[1]
    rounded = 4 * ROUNDING * sides[1].abs().amax(0)
    same = ((difference - difference[0]).abs() <= rounded).all(0) & (difference[0].abs() > 10 * rounded)
    noisy = (sides[1] - sides[1][0]).abs().amax(0) > 100 * rounded
    if not bool((same & noisy).any()):
        return []
    reason = "the noise of a round follows from its number, so that two replies in one round differ by the data alone"
    return [Uncovered(reason=reason, arrays=("the reply",), moved=float(difference[0][same & noisy].norm()))]


SEEDS, FIRST = 1 << 14, 16
"""Number of seeds tried, from 0, and number of first values that do not depend on the length of the draw."""


@cache
def _streams(number: int) -> torch.Tensor:
    """Draw the first normal values (3 S, number) of each generator and seed, with norm 1."""
    drawn = [torch.randn(number, generator=torch.Generator().manual_seed(seed)).numpy() for seed in range(SEEDS)]
    drawn += [
        made(seed).normal(size=number)
        for made in (np.random.default_rng, np.random.RandomState)
        for seed in range(SEEDS)
    ]
    return torch.nn.functional.normalize(torch.from_numpy(np.stack(drawn).astype(np.float64)))


def by_known_seeds(mechanism: Mechanism, pair: Neighbors) -> list[Uncovered]:
    """Compare the first calls' noise with the first draws of PyTorch and NumPy generators after small seeds.

    A generator seeded once explains at most one call; each explained call was seeded by itself.
    """
    if isinstance(mechanism, ManyAtOnce):
        return []
    releases = [mechanism(pair.second) for _ in range(8)]
    name = next((name for name, value in releases[0].items() if 8 <= torch.as_tensor(value).numel() <= 1 << 14), None)
    if name is None:
        return []
    shape = torch.as_tensor(releases[0][name]).shape
    given = pair.second[name] if isinstance(pair.second, Mapping) and name in pair.second else torch.zeros(shape)
    noise = torch.stack([(torch.as_tensor(each[name]).double() - given.double()).reshape(-1) for each in releases])
    first = noise[:, : FIRST if noise.shape[1] >= 2 * FIRST else None]
    likeness = torch.nn.functional.normalize(first) @ _streams(first.shape[1]).T
    best = likeness.max(1)
    if len(best.indices[best.values > 1 - 1e-6].unique()) < 4:
        return []
    return [Uncovered(reason="each call seeds its noise with a small number, which anybody can try", arrays=(name,))]
