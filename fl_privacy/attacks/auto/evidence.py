"""What an update itself shows of the defense that made it, to an attacker that nobody has told."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_privacy.attacks.adaptive import estimate_step
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.effects import Description, MutedFeatures, Part, Quantized, Sparse
from fl_privacy.gradients import loss_gradients
from fl_privacy.types import Batch, Observation, Tensors

_ENOUGH = 64
"""Elements of a tensor from which its values are counted."""

_MORE_ZEROS = 0.05
"""Share of zeros, or of empty columns, beyond those of undefended gradients from which somebody has put them there."""

_MOST_BITS = 12

_OFF_GRID = 0.02
"""Of a step, that levels may be off an even grid in single precision."""

_SMALLEST_KEPT = 0.02
"""Of the median magnitude: where all kept elements are above, it was the largest that were kept."""


@dataclass(frozen=True)
class Usual:
    """Of undefended gradients of a model: the share of zeros of each tensor, and of empty columns of the last layer."""

    zeros: Mapping[str, float]
    columns: float


def usual_of(observation: Observation) -> Usual:
    """From the gradients of a few images of noise; what a ReLU leaves zero is nobody's defense."""
    rng = torch.Generator().manual_seed(0)
    count = observation.upload.num_examples
    like = next(iter(observation.sent.parameters.values()))
    zeros: dict[str, float] = {}
    columns = 0.0
    for _ in range(3):
        images = torch.rand((count, *observation.input_shape), generator=rng).to(like)
        labels = torch.randint(observation.num_classes, (count,), generator=rng).to(like.device)
        state = observation.assumed()
        found = loss_gradients(observation.model, state, Batch(images, labels), batch_norm="eval").gradients
        zeros = {name: max(zeros.get(name, 0.0), share_of_zeros(value)) for name, value in found.items()}
        columns = max(columns, _empty_columns(observation, found))
    return Usual(zeros, columns)


def evident_defense(observation: Observation, usual: Usual) -> Description:
    """The parts of a defense that the update shows; empty where it looks like a gradient."""
    update = observation.update()
    if (effect := _quantized(update)) is not None:
        return (Part("few levels", effect=effect),)
    if _empty_columns(observation, update) > usual.columns + max(_MORE_ZEROS, 0.2 * usual.columns):
        return (Part("empty columns", effect=MutedFeatures()),)
    sizes = {name: value.numel() for name, value in update.items()}
    expected = sum(usual.zeros.get(name, 0.0) * size for name, size in sizes.items())
    seen = sum(share_of_zeros(value) * sizes[name] for name, value in update.items())
    if seen - expected > _MORE_ZEROS * sum(sizes.values()):
        return (Part("zeros", effect=_sparse(update)),)
    return ()


def with_evidence(observation: Observation, usual: Usual) -> Observation:
    """``observation`` by an attacker that takes what it sees for the defense, where it was told none."""
    if observation.knowledge.defense is not None:
        return observation
    found = evident_defense(observation, usual)
    return replace(observation, knowledge=replace(observation.knowledge, defense=found)) if found else observation


def share_of_zeros(value: Tensor) -> float:
    """In [0, 1]."""
    return float((value == 0).double().mean()) if value.numel() else 0.0


def _empty_columns(observation: Observation, update: Tensors) -> float:
    """Share of the columns of the last layer's weight that are zero, while its other columns are not."""
    layer = output_layer(observation.model, observation.num_classes)
    if layer is None or layer[0] not in update:
        return 0.0
    empty = (update[layer[0]] == 0).all(0)
    return 0.0 if bool(empty.all()) else float(empty.double().mean())


def _sparse(update: Tensors) -> Sparse:
    """Zeros that were put there; in each layer the kept ones tell what the others may have been."""
    kept = torch.cat([value[value != 0].abs().flatten() for value in update.values()])
    largest = len(kept) >= _ENOUGH and float(kept.min()) > _SMALLEST_KEPT * float(kept.median())
    return Sparse(largest=largest, scope="layer")


def _quantized(update: Tensors) -> Quantized | None:
    """The grid that every large tensor lies on, where it is the same number of bits for all of them."""
    found = {_bits(value) for value in update.values() if value.numel() >= _ENOUGH and bool(value.any())}
    if len(found) == 0 or None in found:
        return None
    return Quantized(bits=max(bits for bits in found if bits is not None))


def _bits(value: Tensor) -> int | None:
    """Bits of an even grid up to the largest magnitude that ``value`` lies on; ``None`` if it lies on none."""
    levels = torch.unique(value.double())
    largest, step = float(value.abs().max()), estimate_step(value)
    if len(levels) == 2 and float(levels[0]) == -float(levels[1]):
        return 1
    if len(levels) < 3 or len(levels) > min(2**_MOST_BITS, value.numel() // 2) or step <= 0:
        return None
    places = levels / step
    if float((places - places.round()).abs().max()) > max(_OFF_GRID, 1e-6 * largest / step):
        return None
    return max(2, math.ceil(math.log2(2 * largest / step + 2) - 0.01))
