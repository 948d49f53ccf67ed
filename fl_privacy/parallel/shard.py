"""What a task does: attack a part of the victims and tell how far it is."""

import time
import warnings
from collections.abc import Callable, Sequence

import torch

from fl_privacy.attacks import ReconstructionAttack
from fl_privacy.types import Observation, Reconstruction

_TELL_EVERY = 0.5

Tell = Callable[[float], object]
"""Takes the number of victims that are done."""


def cut(observations: Sequence[Observation], parts: int) -> list[list[int]]:
    """Positions of ``observations`` in at most ``parts`` parts of about the same size, in order.

    Updates that are known to come from the same examples stay together.
    """
    units: dict[tuple[bool, str], list[int]] = {}
    for position, observation in enumerate(observations):
        same = observation.knowledge.same_data
        units.setdefault((same is None, same or str(observation.id)), []).append(position)
    lists, count = list(units.values()), min(parts, len(units))
    return [
        [position for unit in lists[k * len(lists) // count : (k + 1) * len(lists) // count] for position in unit]
        for k in range(count)
    ]


def attack_part(
    attack: ReconstructionAttack, observations: Sequence[Observation], *, seed: int, threads: int, tell: Tell
) -> tuple[list[Reconstruction], list[str]]:
    """The reconstructions of a part, and the warnings on the way, which nobody would see otherwise."""
    torch.set_num_threads(threads)
    told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_EVERY:
            told = time.monotonic()
            tell(len(observations) * done / max(total, 1))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = attack(observations, seed=seed, progress=progress)
    return found, list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)))
