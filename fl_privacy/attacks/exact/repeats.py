"""Count how often each example occurs in a batch with equal examples.

The output layer's gradient sums the loss's slopes over the different examples: n p - c under a cross entropy, with n
occurrences, c of these by class.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.certificate import Reproduction
from fl_privacy.attacks.exact.spear import columns_of
from fl_privacy.attacks.gradient_inversion.labels import labels_behind, output_layer
from fl_privacy.attacks.gradient_inversion.targets import as_gradient, is_sum_of_gradients, why_not_attackable
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.models.losses import is_plain
from fl_privacy.types import Batch, Observation, Reconstruction
from fl_privacy.types.user_gradients import COUNTED_BY_RANK

_WHOLE = 0.05  # largest distance of a number of occurrences from a whole number
_TARGET = 0.02  # largest distance of summed targets from whole numbers
_MOST_WAYS = 1000  # largest number of compared combinations of occurrences
_MOST = 8  # largest mean number of occurrences for a batch of unknown size

Times = Callable[[int], list[int] | None]
"""Occurrences of each different example in a batch of this size; ``None`` if no whole numbers fit."""


def with_repeats(victim: Reproduction, images: Tensor) -> tuple[Tensor, str]:
    """Repeat each of the different ``images`` (R, ...) as often as it occurs, with a sentence on that.

    A batch of unknown size may be larger than its rank.
    """
    rank, observation = len(images), victim.observation
    size = observation.upload.num_examples
    stated = not any(note.startswith(COUNTED_BY_RANK) for note in observation.notes)
    if rank > size or (rank == size and (stated or size == 1)):
        return images, ""
    occurrences = times_of(victim, images)
    fitting = (occurrences(number) for number in ([size] if stated else range(rank, _MOST * rank + 1)))
    times = next((found for found in fitting if found is not None), None)
    if times is None:
        equal = torch.full((rank,), size // rank) + (torch.arange(rank) < size % rank)
        note = f"{_different(size, rank)}; how often each occurs the update does not show." if size > rank else ""
        return images.repeat_interleave(equal.to(images.device), 0), note
    found = sum(times)
    *most, least = sorted(times, reverse=True)
    note = f"{_different(found, rank)}, which occur {', '.join(map(str, most))} and {least} times."
    note = note if most else _same(found)
    return images.repeat_interleave(torch.tensor(times, device=images.device), 0), note if found > rank else ""


def _different(size: int, rank: int) -> str:
    return f"The batch is of {size} examples but has {rank} different ones"


def _same(size: int) -> str:
    return f"All {size} examples of the batch are the same."


def times_of(victim: Reproduction, inputs: Tensor, network: nn.Module | None = None) -> Times:
    """Return the occurrences, by the batch's size, of different ``inputs`` (R, ...) of ``network`` or the model.

    Under losses of classes the slopes have lengths in proportion to them. Slopes of others are linear in targets, whose
    sums are whole.
    """
    rank, loss = len(inputs), victim.loss
    if rank == 1:
        return lambda size: [size]
    found = victim.errors(inputs, network)
    observation = victim.observation
    if found is None or (not is_plain(loss) and output_layer(observation.model, observation.num_classes) is None):
        return lambda size: None
    probabilities, errors = found
    if is_plain(loss):
        absent = errors > 0
        return _in_proportion((errors * absent).sum(1) / (probabilities * absent).sum(1))
    head = victim.head(inputs, network)
    if loss.targets == "classes":
        labels, _ = labels_behind(head, loss, errors / rank)
        slopes = head.slopes(loss, labels)
        return _in_proportion((slopes * errors).sum(1) / slopes.square().sum(1))
    base = rank * head.slopes(loss, torch.zeros_like(errors))
    change = rank * head.slopes(loss, torch.ones_like(errors)) - base
    change = torch.where(change.abs() > 0, change, 1)

    def times(size: int) -> list[int] | None:
        ways: list[tuple[list[int], int]] = [([], 0)]
        for own, first, each in zip(errors * size / rank, base, change, strict=True):
            fitting = []
            for number in range(1, size - rank + 2):
                targets = (own - number * first) / each
                whole = targets.round()
                fits = bool(((targets - whole).abs() < _TARGET).all() & (whole >= 0).all() & (whole <= number).all())
                if fits and (loss.targets == "bits" or (int(whole.sum()) == number and len(whole) > 1)):
                    fitting.append(number)
            ways = [([*way, n], total + n) for way, total in ways for n in fitting if total + n <= size]
            if len(ways) > _MOST_WAYS:
                return None
        found = [way for way, total in ways if total == size]
        return found[0] if len(found) == 1 else None

    return times


def _in_proportion(weights: Tensor) -> Times:
    shares = (weights / weights.sum()).nan_to_num(0.0)

    def times(size: int) -> list[int] | None:
        whole = (shares * size).round().clamp_min(1)
        return whole.long().tolist() if float((shares * size - whole).abs().max()) < _WHOLE else None

    return times


def as_one(observation: Observation) -> Observation | None:
    """Return the observation of one example whose batch repeats it; ``None`` unless the output layer shows that.

    Its gradient has rank 1 then. With two outputs it always has.
    """
    size, labels = observation.upload.num_examples, observation.knowledge.labels
    plan = observation.plan
    one_step = plan.shares == "gradient" or (is_sum_of_gradients(plan) and number_of_steps(size, plan) == 1)
    if size == 1 or not one_step or why_not_attackable(observation) is not None:
        return None
    layer = output_layer(observation.model, observation.num_classes)
    if observation.num_classes < 3 or layer is None or layer[0] not in observation.upload.tensors:
        return None
    basis = columns_of(as_gradient(observation)[layer[0]], 1)
    if basis is None or basis.shape[1] != 1 or (labels is not None and not bool((labels == labels[0]).all())):
        return None
    return replace(
        observation,
        upload=replace(observation.upload, num_examples=1),
        knowledge=replace(observation.knowledge, labels=None if labels is None else labels[:1]),
    )


def repeated(found: Reconstruction, size: int) -> Reconstruction:
    """Repeat a reconstructed example ``size`` times, with a sentence on that."""
    assert found.batch is not None
    batch = Batch(found.batch.inputs.repeat_interleave(size, 0), found.batch.labels.repeat_interleave(size, 0))
    return replace(found, batch=batch, notes=(*found.notes, _same(size)))
