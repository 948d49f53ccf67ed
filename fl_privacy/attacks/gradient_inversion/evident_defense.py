"""Infer from an update the defense that made it, without its settings."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.attackable import why_not_attackable
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.noise import noise_over_gradient, ratio_of_gradient
from fl_privacy.effects import Clipped, Description, MutedFeatures, Noise, Part, Quantized, Sparse
from fl_privacy.models.gradients import loss_gradients, set_mode
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.models.unwrap_model import detached_copy
from fl_privacy.types import Batch, Observation, Tensors

_ENOUGH = 64
"""Least number of elements of a tensor whose values are counted."""

_MORE_ZEROS = 0.05
"""Excess share of zeros, or of empty columns, over undefended gradients that shows a defense."""

_MOST_BITS = 12

_OFF_GRID = 0.02
"""Share of a step by which levels may be off an even grid in single precision."""

_AT_THRESHOLD = 0.02
"""Share of kept elements within a factor of two of the smallest that shows a threshold."""


_NOISY, _UNUSUAL = 1e-4, 100.0
"""Ratio of noise to gradient from which it shows, absolute and relative to an undefended gradient's."""

CLIPPED: Description = (Part("norm", effect=Clipped(norm=None)),)
"""A clipped update with an unknown bound: its own norm."""


@dataclass(frozen=True)
class Usual:
    """Statistics of undefended gradients: shares of scattered zeros and of empty columns, and relative noise."""

    scattered: float
    columns: float
    noise: float


def usual_of(observation: Observation) -> Usual:
    """Measure undefended gradients of noise images, as a ReLU leaves zeros, too."""
    rng = torch.Generator().manual_seed(0)
    count = observation.upload.num_examples
    like = next(iter(observation.sent.parameters.values()))
    scattered = columns = noise = 0.0
    model, state, loss = detached_copy(observation.model), observation.assumed(), observation.loss or CROSS_ENTROPY
    set_mode(model, "eval")
    if observation.plan.mode == "eval":
        model.eval()
    for _ in range(3):
        images = torch.rand((count, *observation.input_shape), generator=rng).to(like)
        labels = torch.randint(observation.num_classes, (count,), generator=rng).to(like.device)
        with _same_draws(like.device):
            result = loss_gradients(model, state, Batch(images, labels), batch_norm=None, loss_function=loss)
        found = result.gradients
        scattered = max(scattered, scattered_zeros(found))
        columns = max(columns, _empty_columns(observation, found))
        noise = max(noise, ratio_of_gradient(found, observation))
    return Usual(scattered, columns, noise)


@contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def evident_defense(observation: Observation, usual: Usual) -> Description:
    """Infer the parts of a defense that the update shows."""
    update = observation.update()
    if (effect := _quantized(update)) is not None:
        return (Part("few levels", effect=effect),)
    if scattered_zeros(update) > usual.scattered + _MORE_ZEROS:
        return (Part("zeros", effect=_sparse(update)),)
    if _empty_columns(observation, update) > usual.columns + max(_MORE_ZEROS, 0.2 * usual.columns):
        return (Part("empty columns", effect=MutedFeatures()),)
    if (noise_over_gradient(observation) or 0.0) > max(_NOISY, _UNUSUAL * usual.noise):
        return (Part("noise", effect=Noise(std=None, clip=None)),)
    return ()


def seen_through(observations: Sequence[Observation], *, clips: bool = False) -> list[Observation]:
    """Infer the defense of each observation whose attacker is given none.

    ``clips`` takes an update that shows nothing, or noise, for one clipped to its own norm.
    """
    usual: dict[tuple[object, ...], Usual | None] = {}
    seen = []
    for observation in observations:
        whole = observation.knowledge.bounds is None
        if observation.knowledge.defense is None and whole and why_not_attackable(observation) is None:
            shape = observation.upload.num_examples, observation.input_shape, observation.num_classes
            key = id(observation.model), id(observation.sent), *shape
            if key not in usual:
                usual[key] = _usual_if_any(observation)
            own = usual[key]
            found = () if own is None else evident_defense(observation, own)
            if clips and own is not None and all(isinstance(part.effect, Noise) for part in found):
                found = (*CLIPPED, *found)
            observation = observation.told(defense=found) if found else observation  # noqa: PLW2901
        seen.append(observation)
    return seen


def _usual_if_any(observation: Observation) -> Usual | None:
    try:
        return usual_of(observation)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return None


def scattered_zeros(update: Tensors) -> float:
    """Return the share of zeros in no empty row or column, which silent neurons leave."""
    zeros = total = 0
    for value in update.values():
        if value.dim() > 1:
            empty = value.flatten(1) == 0
            live = empty[~empty.all(1)][:, ~empty.all(0)]
            zeros, total = zeros + int(live.sum()), total + live.numel()
    return zeros / total if total else 0.0


def _empty_columns(observation: Observation, update: Tensors) -> float:
    """Return the share of the last layer's columns that are zero, 0 if all are."""
    layer = output_layer(observation.model, observation.num_classes)
    if layer is None or layer[0] not in update:
        return 0.0
    empty = (update[layer[0]] == 0).all(0)
    return 0.0 if bool(empty.all()) else float(empty.double().mean())


def _sparse(update: Tensors) -> Sparse:
    """Describe a defense's zeros; the kept values of each layer bound the others."""
    votes = total = 0
    for value in update.values():
        kept = value[value != 0].abs()
        if len(kept) >= _ENOUGH:
            total += len(kept)
            near = int((kept <= 2 * kept.min()).sum())
            votes += len(kept) if near >= max(4, _AT_THRESHOLD * len(kept)) else 0
    return Sparse(largest=2 * votes > total, scope="layer")


def _quantized(update: Tensors) -> Quantized | None:
    """Find the grid that every large tensor lies on; ``None`` without a common one."""
    found = {grid_bits(value) for value in update.values() if value.numel() >= _ENOUGH and bool(value.any())}
    if len(found) == 0 or None in found:
        return None
    return Quantized(bits=max(bits for bits in found if bits is not None))


def grid_bits(value: Tensor) -> int | None:
    """Return the bits of an even grid, up to the largest magnitude, that ``value`` lies on, if any."""
    most = max(2, min(2**_MOST_BITS, value.numel() // 2))
    if len(torch.unique(value.flatten()[: 2 * most])) > most:
        return None
    levels = torch.unique(value.double())
    if len(levels) == 2 and float(levels[0]) == -float(levels[1]):
        return 1
    if len(levels) < 3 or len(levels) > most:
        return None
    largest, step = float(value.abs().max()), float(levels.diff().min())
    highest = round(largest / step)
    if highest > 2**_MOST_BITS:
        return None
    places = levels * highest / largest
    if float((places - places.round()).abs().max()) > _OFF_GRID:
        return None
    return max(2, math.ceil(math.log2(2 * highest + 2)))
