"""From images read out of a layer to a reconstruction, and its labels.

Whether what was read is one image: its pixels are whole 255ths, which those of a mixture are not.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.evident_defense import Usual, evident_defense, grid_bits
from fl_privacy.attacks.gradient_inversion.labels import choose_labels, output_layer
from fl_privacy.attacks.malicious.imprint_block import BLOCK
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

UNKNOWN = -1
"""Label of an image whose class was not read."""


def reconstruction_of(
    observation: Observation, images: Tensor, proven: Tensor, *, labels: bool = True
) -> Reconstruction:
    """Build the reconstruction of images found in ``observation``.

    Args:
        observation: of the update.
        images: (N, D) or (N, C, H, W).
        proven: (N,) which of them are single images, if nobody has changed the update; where it shows that somebody
            did, none is.
        labels: whether the update is one batch's, so that its labels follow from the output layer.
    """
    if not len(images):
        return Reconstruction(id=observation.id, batch=None, failure="Nothing in the update tells of a single image.")
    proven = proven & (not _is_defended(observation))
    shaped = images.reshape(len(images), *observation.input_shape)
    each = tuple(Certainty.PROVEN if sure else Certainty.APPROXIMATE for sure in proven.tolist())
    found, source = _labels(observation, len(images)) if labels else (torch.full((len(images),), UNKNOWN), "inferred")
    return Reconstruction(
        id=observation.id,
        batch=Batch(shaped.clamp(0, 1).float().cpu(), found),
        loss=float((~proven).double().mean()),
        label_source=source,
        certainty=min(each, key=list(reversed(Certainty)).index),
        certainties=each,
    )


def _is_defended(observation: Observation) -> bool:
    """Say whether the first or last layer of the honest model shows zeros or few levels that somebody has put there.

    Their gradients have no scattered zeros; those of layers in between have, where few neurons fire.
    """
    layer, tensors = output_layer(observation.model, observation.num_classes), observation.upload.tensors
    honest = [name for name, tensor in tensors.items() if tensor.dim() > 1 and not name.startswith(f"{BLOCK}.")]
    ends = {*honest[:1], *([layer[0]] if layer else [])}
    if not all(bool(tensors[name].any()) for name in ends & tensors.keys()):
        return True
    upload = replace(observation.upload, tensors={name: tensors[name] for name in ends & tensors.keys()})
    return bool(evident_defense(replace(observation, upload=upload), Usual(scattered=0.0, columns=1.0, noise=math.inf)))


def _labels(observation: Observation, number: int) -> tuple[Tensor, str]:
    """Return the batch's labels (number,) as far as they are known or follow from the output layer, in no order."""
    found, source = None, "inferred"
    state, unknown = observation.assumed(), torch.full((number,), UNKNOWN)
    if any(name not in state.parameters for name, _ in observation.model.named_parameters()):
        return unknown, source
    sent = next(iter(state.parameters.values()))
    model = frozen_copy(observation.model, state, observation.plan, device=sent.device, dtype=sent.dtype)
    try:
        scale = observation.plan.loss_scale
        found, source = choose_labels(observation, "auto", model, loss_scale=scale, seed=0)
    except NotAttackableError:
        pass
    labels = unknown
    if found is not None:
        classes = (found.argmax(1) if found.dim() == 2 else found).cpu()
        labels[: len(classes)] = classes[:number]
    return labels, source


LEVELS = 255.0
WHOLE = 0.01
"""Root mean square distance of pixels from a level below which they are one image; of a mixture it is 0.29."""

LEAST_LEVELS = 32
"""Different levels that an image needs so that its pixels tell. Of two images of few levels each, a mixture has few
values as well, which come near to levels by chance: of two black-and-white ones in 15 to 40 of 100 mixtures."""

COARSER = (2, 3, 5, 7)
"""Steps between levels that an image may not have throughout: what is mixed half and half of two images whose levels
are multiples of 8 has multiples of 4, which are whole."""

NEARLY = 0.1
"""Likewise of pixels that the precision of weights has blurred."""

_NEARLY = 0.25
"""Pixels so near to black or white, in levels, tell nothing: those of a mixture of two such images are there too."""

_STEP = 0.2
_MOST_STEPS = 512
_SAMPLED = 512


def is_one_image(pixels: Tensor, error: Tensor | None = None, *, blur: Tensor | None = None) -> Tensor:
    """Say which rows of ``pixels`` (N, D) are a single image of 8 bits a channel, but for rounding: (N,).

    ``error`` (N,) is the standard deviation of what rounding did to the pixels of each: with more of it than a
    hundredth of a level nothing is told, since what is rounded coarsely is on levels of its own.

    ``blur`` (N,) is that of the precision in which weights are uploaded: pixels may be as far from levels as it
    explains, but no farther than ``NEARLY``.

    It takes neither the truth nor another image. An image that noise was added to, whose scale is not quite known, or
    that has fewer than ``LEAST_LEVELS`` levels beside black and white, or every second, third, fifth or seventh alone,
    is not told from a mixture. What is left: images of even levels alone, mixed half and half to a ten-thousandth, that
    the update itself tells apart (``own_gradient``).
    """
    levels = LEVELS * pixels.double()
    telling = (levels > _NEARLY) & (levels < LEVELS - _NEARLY)
    apart = (levels - levels.round()).square() * telling
    # which levels (N, 256) the ``telling`` pixels of each row (N, D) are nearest to
    nearest = levels.round().clamp(0, LEVELS).long()
    seen = torch.zeros(len(levels), int(LEVELS) + 1, dtype=torch.int64, device=levels.device)
    number, seen = telling.sum(1), seen.scatter_add_(1, nearest, telling.long()) > 0
    inside = ((levels > -1) & (levels < LEVELS + 1)).all(1)
    fine = torch.ones_like(inside) if error is None else LEVELS * error < WHOLE
    most = levels.new_full((len(levels),), WHOLE) if blur is None else (WHOLE + 2 * LEVELS * blur).clamp_max(NEARLY)
    various = (seen.sum(1) >= LEAST_LEVELS) & ~_on_coarser_steps(seen)
    return fine & various & inside & ((apart.sum(1) / number.clamp_min(1)).sqrt() < most)


def _on_coarser_steps(seen: Tensor) -> Tensor:
    """Say whether all levels of a row of ``seen`` (N, 256) leave the same rest by one of ``COARSER``, (N,)."""
    found = torch.zeros(len(seen), dtype=torch.bool, device=seen.device)
    for step in COARSER:
        rests = torch.stack([seen[:, rest::step].any(1) for rest in range(step)])
        found |= rests.sum(0) == 1
    return found


def images_of_brightness(
    rows: Tensor, low: Tensor, high: Tensor, *, smallest: float, rounding: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scale rows (bins, D), known up to a factor, to the brightness in [low, high] (bins,) of each.

    Returns pixels (N, D), and (N,) whether each is a single image; ``rounding`` is the standard deviation of what
    rounding did to the rows. The strongest come first; rows below the share ``smallest`` of the strongest hold nothing
    else.
    """
    strength = rows.norm(dim=1)
    order = strength.argsort(descending=True)
    order = order[strength[order] > smallest * strength.max()]
    brightness, tiny = rows[order].mean(1, keepdim=True), torch.finfo(torch.float64).tiny
    directions = rows[order] / torch.where(brightness.abs() > tiny, brightness, torch.full_like(brightness, tiny))
    pixels = rescaled(directions, low[order], high[order])
    error = rounding * pixels.norm(dim=1) / strength[order]
    return pixels, is_one_image(pixels, error) & (not on_grid(rows[order]))


def on_grid(rows: Tensor) -> bool:
    """Say whether all rows (N, D) together lie on one even grid of few levels, as only a quantized update's do.

    A single row is always on one, that of its image's 255ths.
    """
    return len(rows) > 1 and grid_bits(rows) is not None


def rescaled(directions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Scale ``directions`` (N, D) by the factor in [``low``, ``high``] (N,) that brings most pixels to a level.

    Rows for which none does get the factor in the middle.
    """
    d, middle = directions.double(), (low + high).double() / 2
    if not len(d):
        return d
    found = torch.stack([_factor(row, float(a), float(b)) for row, a, b in zip(d, low, high, strict=True)])
    whole = is_one_image(d * found[:, None])
    return d * torch.where(whole, found, middle)[:, None]


def _factor(direction: Tensor, low: float, high: float) -> Tensor:
    """Return the best factor of a grid over [low, high], then refined by least squares on the levels it rounds to."""
    steps = int(min(_MOST_STEPS, max(3.0, (high - low) * LEVELS * float(direction.abs().max()) / _STEP)))
    tried = torch.linspace(low, high, steps, dtype=torch.float64, device=direction.device)
    sampled = direction[:: max(1, len(direction) // _SAMPLED)]
    levels = LEVELS * tried[:, None] * sampled
    best = tried[(levels - levels.round()).square().mean(1).argmin()]
    for _ in range(3):
        nearest = (LEVELS * best * direction).round()
        best = (nearest @ direction) / (LEVELS * (direction @ direction).clamp_min(torch.finfo(torch.float64).tiny))
    return best.clamp(low, high)
