"""Choose public images, texts and rows as distractors and controls."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fl_privacy.data import Examples, LabelledExamples, images_of, load_data
from fl_privacy.errors import UserError
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.public_images import PublicImages
from fl_privacy.rng import derive_generator
from fl_privacy.types.modality import ROWS, TEXTS, Modality

logger: logging.Logger = logging.getLogger(__name__)

MOST = 1000
"""Default number of distractor images."""

MOST_NEAR = 10_000
"""Most public images searched for the one nearest to an original."""

_MOST_VALUES = 1 << 26
"""Most pixels of all candidates together."""

_MOST_TEXTS = 10_000

_PHOTOGRAPHS, _DIGITS = "photograph", "mnist_mini"
"""Data sets shipped by packages."""


def unattacked_others(examples: LabelledExamples, number: int, *, seed: int, name: str) -> Distractors:
    """Choose ``number`` public images at random, 0 for none; for texts and rows, up to 10,000."""
    order = torch.randperm(len(examples), generator=derive_generator(seed, "candidates"))
    if (few := _FEW.get(examples.modality)) is not None:
        return few(examples, order[:_MOST_TEXTS])
    chosen = order[: at_most(number, examples.input_shape)].sort().values
    if not len(chosen):
        return Distractors()
    batch = examples.batch(chosen)
    images = images_of(examples)
    more = None if images is None else images.images[order[:MOST_NEAR]]
    return Distractors(candidates=_shared(batch.inputs, batch.labels, f"public images of {name}", more))


_LATEST: dict[bytes, PublicImages] = {}
"""Last public images of this process, by a hash of their content."""

_MOST_LATEST, _MOST_KEPT = 2, 1 << 22
"""Most cached public images, and most pixels of each."""


def _shared(images: Tensor, labels: Tensor | None, name: str, more: Tensor | None = None) -> PublicImages:
    made = PublicImages(images=images, labels=labels, name=name, more=more)
    if images.numel() > _MOST_KEPT:
        return made
    told = [tensor.contiguous().cpu() for tensor in (images, labels) if tensor is not None]
    digest = hashlib.blake2b(repr([name, *((tensor.shape, tensor.dtype) for tensor in told)]).encode())
    for tensor in told:
        digest.update(tensor.numpy().tobytes())
    _LATEST[digest.digest()] = found = _LATEST.pop(digest.digest(), made)
    while len(_LATEST) > _MOST_LATEST:
        del _LATEST[next(iter(_LATEST))]
    return found


_FEW: Mapping[Modality, Callable[[Any, Tensor], Distractors]] = {
    TEXTS: lambda examples, chosen: Distractors(texts=examples.tokens[chosen]),
    ROWS: lambda examples, chosen: Distractors(
        rows=examples.schema.cells(examples.inputs[chosen]),
        labels=examples.labels[chosen]
        if examples.labels.dim() == 1 and not examples.labels.is_floating_point()
        else None,
    ),
}
"""Modality -> choice of controls without a number."""


def shipped_others(shape: tuple[int, ...], number: int = MOST, *, seed: int) -> Distractors:
    """Choose shipped images as distractors for originals of ``shape`` (C, H, W): random crops of photographs.

    For one channel, half of them are handwritten digits; without the packages there are none.
    """
    if len(shape) != 3 or not (number := at_most(number, shape)):
        return Distractors()
    made = _made_once if number * math.prod(shape) <= _MOST_KEPT else _made
    return Distractors(candidates=made(tuple(shape), number, seed))


def _made(shape: tuple[int, ...], number: int, seed: int) -> PublicImages | None:
    rng = derive_generator(seed, "candidates")
    digits = torch.empty(0, *shape)
    if shape[0] == 1 and (found := next(_shipped(_DIGITS), None)) is not None:
        chosen = found.images[torch.randperm(len(found), generator=rng)[: number // 2]].float() / 255
        digits = functional.interpolate(chosen, size=shape[1:], mode="bilinear", antialias=True).clamp(0, 1)
    cuts = _cuts(shape, number - len(digits), rng)
    if not len(images := torch.cat([digits, cuts])):
        return None
    kinds = ["cuts of photographs"] * bool(len(cuts)) + ["handwritten digits"] * bool(len(digits))
    return _shared(images, None, f"{' and '.join(kinds)} that packages ship")


_made_once = lru_cache(maxsize=_MOST_LATEST)(_made)


def at_most(number: int, shape: tuple[int, ...]) -> int:
    """Return ``number``, limited by the memory of images of ``shape``."""
    return min(number, _MOST_VALUES // max(1, math.prod(shape)))


def _cuts(shape: tuple[int, ...], number: int, rng: torch.Generator) -> Tensor:
    """Crop images (N, C, H, W) at random, between a tenth and the whole of a photograph's shorter side."""
    pictures = [examples.images.float() / 255 for examples in _shipped(_PHOTOGRAPHS)]
    if not pictures or shape[0] not in (1, 3):
        return torch.empty(0, *shape)
    every = [picture for some in pictures for picture in some]
    made = []
    for _ in range(number):
        picture = every[int(torch.randint(len(every), (), generator=rng))]
        height, width = picture.shape[-2:]
        share = 0.1 + 0.9 * float(torch.rand((), generator=rng))
        unit = share * min(height / shape[1], width / shape[2])
        size = max(1, int(unit * shape[1])), max(1, int(unit * shape[2]))
        top, left = (
            int(torch.randint(total - part + 1, (), generator=rng))
            for total, part in zip((height, width), size, strict=True)
        )
        cut = picture[:, top : top + size[0], left : left + size[1]]
        cut = cut.mean(0, keepdim=True) if shape[0] == 1 else cut
        made.append(functional.interpolate(cut[None], size=shape[1:], mode="bilinear", antialias=True)[0])
    return torch.stack(made).clamp(0, 1)


def _shipped(name: str) -> Iterator[Examples]:
    try:
        found = load_data(name, image_size=256 if name == _PHOTOGRAPHS else None).train
    except UserError as error:
        logger.info("No candidates from %s: %s", name, error)
        return
    if (images := images_of(found)) is not None:
        yield images
