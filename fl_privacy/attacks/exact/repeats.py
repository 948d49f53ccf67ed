"""Count how often each image occurs in a batch with equal images.

The output layer's gradient sums n p - c over the different images, with n occurrences, c of these by class.
"""

import torch
from torch import Tensor

from fl_privacy.attacks.exact.certificate import Reproduction
from fl_privacy.models.losses import is_plain
from fl_privacy.types.user_gradients import COUNTED_BY_RANK

_WHOLE = 0.05
"""Largest distance of a number of occurrences from a whole number."""

_MOST = 8
"""Largest mean number of occurrences for a batch of unknown size."""


def with_repeats(victim: Reproduction, images: Tensor) -> tuple[Tensor, str]:
    """Repeat each of the different ``images`` (R, ...) as often as it occurs, with a sentence on that.

    A batch of unknown size may be larger than its rank.
    """
    rank, observation = len(images), victim.observation
    size = observation.upload.num_examples
    stated = not any(note.startswith(COUNTED_BY_RANK) for note in observation.notes)
    if rank > size or (rank == size and (stated or size == 1)):
        return images, ""
    shares = _shares(victim, images)
    sizes = [size] if stated else range(rank, _MOST * rank + 1)
    fitting = (n for n in sizes if float((shares * n - (shares * n).round().clamp_min(1)).abs().max()) < _WHOLE)
    found = next(fitting, None)
    if found is None:
        times = torch.full((rank,), size // rank) + (torch.arange(rank) < size % rank)
        return images.repeat_interleave(times.to(images.device), 0), ""
    times = (shares * found).round().long()
    *most, least = sorted(times.tolist(), reverse=True)
    occur = f"{', '.join(map(str, most))} and {least}"
    sentence = f"The batch is of {found} examples but has {rank} different ones, which occur {occur} times."
    if not most:
        sentence = f"All {found} examples of the batch are the same."
    return images.repeat_interleave(times, 0), sentence if found > rank else ""


def _shares(victim: Reproduction, images: Tensor) -> Tensor:
    """Return the share (R,) of the batch that each image has; equal ones if unknown."""
    found = victim.errors(images) if len(images) > 1 and is_plain(victim.loss) else None
    if found is None:
        return torch.full((len(images),), 1 / len(images), device=images.device)
    probabilities, errors = found
    absent = errors > 0
    weights = (errors * absent).sum(1) / (probabilities * absent).sum(1)
    return (weights / weights.sum()).nan_to_num(0.0)
