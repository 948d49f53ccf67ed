"""Count how often each example occurs in a batch with equal examples.

The output layer's gradient sums the loss's slopes over the different examples: n p - c under a cross entropy, with n
occurrences, c of these by class.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.certificate import Reproduction
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.solved_labels import labels_behind
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.models.gradients.choose_method import number_of_steps
from fl_privacy.models.losses import is_plain
from fl_privacy.types import Batch, Observation, Reconstruction
from fl_privacy.types.user_gradients import COUNTED_BY_RANK

_WHOLE = 0.05
"""Largest distance of a number of occurrences from a whole number."""

_TARGET = 0.02
"""Largest distance of summed targets from whole numbers."""

_MOST = 8
"""Largest mean number of occurrences for a batch of unknown size."""

_ONE = 1e-4
"""Second singular value of the output layer's gradient, relative to the first, below which examples are all equal."""

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
    if found is None:
        return lambda size: None
    probabilities, errors = found
    if is_plain(loss):
        absent = errors > 0
        return _in_proportion((errors * absent).sum(1) / (probabilities * absent).sum(1))
    if output_layer(victim.observation.model, victim.observation.num_classes) is None:
        return lambda size: None
    head = victim.head(inputs, network)
    if loss.targets == "classes":
        labels, _ = labels_behind(head, loss, errors / rank)
        slopes = head.slopes(loss, labels)
        return _in_proportion((slopes * errors).sum(1) / slopes.square().sum(1))
    zeros = torch.zeros_like(errors)
    base = rank * head.slopes(loss, zeros)
    change = rank * head.slopes(loss, zeros + 1) - base
    change = torch.where(change.abs() > 0, change, 1)
    if loss.targets == "values" and errors.shape[1] == 1:
        return lambda size: None  # one number of each is nothing to count by

    def times(size: int) -> list[int] | None:
        reached: dict[int, list[list[int]]] = {0: [[]]}  # sum of occurrences -> at most two ways to it
        for own, first, each in zip(errors * size / rank, base, change, strict=True):
            fitting = []
            for number in range(1, size - rank + 2):
                targets = (own - number * first) / each
                whole = targets.round()
                fits = bool(((targets - whole).abs() < _TARGET).all() & (whole >= 0).all() & (whole <= number).all())
                if fits and (loss.targets == "bits" or int(whole.sum()) == number):
                    fitting.append(number)
            longer: dict[int, list[list[int]]] = {}
            for total, ways in reached.items():
                for number in fitting:
                    longer.setdefault(total + number, []).extend([*way, number] for way in ways)
            reached = {total: ways[:2] for total, ways in longer.items() if total <= size}
        ways = reached.get(size, [])
        return ways[0] if len(ways) == 1 else None

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
    layer = output_layer(observation.model, observation.num_classes)
    if size == 1 or observation.num_classes < 3 or layer is None or layer[0] not in observation.upload.tensors:
        return None
    if plan.shares != "gradient" and number_of_steps(size, plan) != 1:
        return None
    values = torch.linalg.svdvals(as_gradient(observation)[layer[0]].double())
    if len(values) < 2 or not 0 < float(values[0]) or float(values[1]) > _ONE * float(values[0]):
        return None
    if labels is not None and not bool((labels == labels[0]).all()):
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
