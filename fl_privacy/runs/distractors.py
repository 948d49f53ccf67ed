"""Choose public images, texts and rows as distractors and controls."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset as TorchDataset

from fl_privacy.data import Dataset, Examples, LabelledExamples, images_of, load_data
from fl_privacy.data.app_data import as_sample, first_data_set, own_streams_put_back, samples
from fl_privacy.errors import UserError
from fl_privacy.federation import Failure, attempt
from fl_privacy.measure.descriptors import Latest
from fl_privacy.measure.distractors import Distractors
from fl_privacy.measure.identification import PublicImages
from fl_privacy.measure.outcome import LEAST_CANDIDATES
from fl_privacy.rng import derive_generator, streams_put_back
from fl_privacy.runs.app_truth import KnownImages
from fl_privacy.types import Batch, VictimId
from fl_privacy.types.modality import ROWS, TEXTS, Modality

logger: logging.Logger = logging.getLogger(__name__)
MOST = 1000  # default number of distractor images
MOST_NEAR = 10_000  # most public images searched for the one nearest to an original
_MOST_VALUES = 1 << 26  # most pixels of all candidates together
_MOST_TEXTS = 10_000
_PHOTOGRAPHS, _DIGITS = "photograph", "mnist_mini"  # data sets shipped by packages


def unattacked_others(examples: LabelledExamples, number: int, *, seed: int, name: str) -> Distractors:
    """Draw unattacked examples to compare reconstructions with: at most ``number`` images, or 10,000 texts or rows."""
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


_MOST_LATEST, _MOST_KEPT = 2, 1 << 22  # most cached public images, and most pixels of each
_latest = Latest(lambda images: dict[object, PublicImages](), _MOST_LATEST)  # last public images of this process


def _shared(images: Tensor, labels: Tensor | None, name: str, more: Tensor | None = None) -> PublicImages:
    made = PublicImages(images=images, labels=labels, name=name, more=more)
    if images.numel() > _MOST_KEPT:
        return made
    key = name, None if labels is None else (labels.shape, labels.cpu().numpy().tobytes())
    return _latest(images.cpu()).setdefault(key, made)


_FEW: Mapping[Modality, Callable[[Any, Tensor], Distractors]] = {
    TEXTS: lambda examples, chosen: Distractors(texts=examples.tokens[chosen]),
    ROWS: lambda examples, chosen: Distractors(
        rows=examples.schema.cells(examples.inputs[chosen]),
        labels=examples.labels[chosen]
        if examples.labels.dim() == 1 and not examples.labels.is_floating_point()
        else None,
    ),
}
"""Modality -> function from public examples and indices to distractors."""


def shipped_others(shape: tuple[int, ...], number: int = MOST, *, seed: int) -> Distractors:
    """Return up to ``number`` images of ``shape`` from installed packages: parts of photographs, and digits if gray."""
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
    """Return ``number``, lowered to the number of images of ``shape`` that fit into memory."""
    return min(number, _MOST_VALUES // max(1, math.prod(shape)))


def _cuts(shape: tuple[int, ...], number: int, rng: torch.Generator) -> Tensor:
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


NO_CLASS = -1  # class of images shipped by packages
SPARE = 100  # extra images drawn, to replace a client's own
MOST_PLACES = 32  # most partitions whose images are candidates
Samples = list[tuple[Tensor, int]]


@dataclass(frozen=True)
class _Drawn:
    """An image (C, H, W) in [0, 1]; ``place``: (partition, index), ``None`` if no client trains on the image."""

    image: Tensor
    label: int
    place: tuple[int | None, int] | None


def others_of_app(
    data: KnownImages,
    attacked: Sequence[VictimId],
    truth: KnownImages,
    shape: tuple[int, ...],
    number: int = MOST,
    *,
    seed: int,
    nodes: int | None = None,
) -> Distractors:
    """Return distractors: images that were not attacked, with which reconstructions are compared.

    For one client's updates, only images attacked at this client are left out. If the app's data have too few images,
    those of installed packages are added.

    Args:
        data: data of the app; test examples are taken first.
        truth: looks up the originals of the ``attacked`` uploads.
        shape: (C, H, W) of an image.
        number: largest number of distractors.
        nodes: number of nodes, with partitions 0 to ``nodes - 1``; ``None`` takes the partitions stated by clients.
    """
    if len(shape) != 3 or not (number := at_most(number, shape)):
        return Distractors()
    found = attempt(lambda: _drawn(data, _places(data, attacked, nodes, seed), number, seed))
    if isinstance(found, Failure):
        logger.warning("No candidates from the app's data: %s", found.reason)
        found = []
    alike = [each for each in found if tuple(each.image.shape) == shape]
    left = _left_by_client(alike, attacked, truth, shape)

    def others(chosen: Iterable[_Drawn]) -> Distractors:
        return others_among([(each.image, each.label) for each in chosen], [], shape, number, seed=seed)

    shared = others(alike)

    @lru_cache(maxsize=1)  # victims come client by client
    def of_client(client: int) -> PublicImages | None:
        return others(alike[k] for k in left[client]).candidates if client in left else shared.candidates

    return replace(shared, of_client=of_client)


def _left_by_client(
    drawn: Sequence[_Drawn], attacked: Sequence[VictimId], truth: KnownImages, shape: tuple[int, ...]
) -> dict[int, list[int]]:
    if not drawn:
        return {}
    images = PublicImages(images=torch.stack([each.image for each in drawn]).float().clamp(0, 1))
    victims: dict[int, list[VictimId]] = {}
    for victim in attacked:
        victims.setdefault(victim.client, []).append(victim)
    found = {}
    for client, own in victims.items():
        known = [batch.inputs for victim in own if (batch := truth.batch(victim)) is not None]
        originals = [each for each in known if tuple(each.shape[1:]) == shape]
        equal = images.equal(torch.cat([*originals, torch.empty(0, *shape)])).tolist()
        partitions = {each.place[0] for each in drawn if each.place is not None}
        taken = {(place, k) for place in partitions for k in truth.places_of(own, place)}
        rest = [k for k, each in enumerate(drawn) if not equal[k] and each.place not in taken]
        if len(rest) < len(drawn):
            found[client] = rest
    return found


def others_among(
    images: Samples, attacked: Sequence[Batch], shape: tuple[int, ...], number: int = MOST, *, seed: int
) -> Distractors:
    """Return unattacked images in [0, 1] to compare reconstructions with; if few, add images of installed packages."""
    taken, labels = torch.empty(0, *shape), torch.empty(0, dtype=torch.long)
    if images:
        taken = torch.stack([image for image, _ in images]).float().clamp(0, 1)
        labels = torch.tensor([label for _, label in images])
        originals = [batch.inputs for batch in attacked if tuple(batch.inputs.shape[1:]) == shape]
        keep = ~PublicImages(images=taken).equal(torch.cat([*originals, torch.empty(0, *shape)]))
        taken, labels = taken[keep][:number], labels[keep][:number]
    enough = len(taken) >= min(LEAST_CANDIDATES, number)
    shipped = None if enough else shipped_others(shape, number - len(taken), seed=seed).candidates
    if shipped is None:
        return Distractors(candidates=PublicImages(images=taken, labels=labels, name="other images of the same data"))
    if not len(taken):
        return Distractors(candidates=shipped)
    every, labels = torch.cat([taken, shipped.images]), F.pad(labels, (0, len(shipped.images)), value=NO_CLASS)
    name = f"{len(taken)} other images of the same data and {shipped.name}"
    return Distractors(candidates=PublicImages(images=every, labels=labels, name=name))


def _places(known: KnownImages, attacked: Sequence[VictimId], nodes: int | None, seed: int) -> Sequence[int | None]:
    if known.of_client is None:
        return [None]
    if nodes is None:
        return list(dict.fromkeys(known.partition(victim.client) for victim in attacked))
    drawn = torch.randperm(max(1, nodes), generator=derive_generator(seed, "partitions"))
    return sorted(drawn[:MOST_PLACES].tolist())


def _drawn(known: KnownImages, places: Sequence[int | None], number: int, seed: int) -> list[_Drawn]:
    held: list[_Drawn] = []
    trained: list[_Drawn] = []
    most = 1 + (number + SPARE) // len(places)
    for place in places:
        found = attempt(lambda: _drawn_at(known, place, most, seed, number - len(held)))  # noqa: B023
        if isinstance(found, Failure):
            logger.warning("No candidates from the data of partition %s: %s", place, found.reason)
        else:
            held += found[0]
            trained += found[1]
    return held + trained


def _drawn_at(
    known: KnownImages, place: int | None, most: int, seed: int, wanted: int
) -> tuple[list[_Drawn], list[_Drawn]]:
    with streams_put_back():
        data = known.data if place is None or known.of_client is None else known.of_client(place)
        rng = derive_generator(seed, "candidates", place or 0)
        pair = isinstance(data, tuple | list) and len(data) > 1
        second = data.test if isinstance(data, Dataset) else None
        if pair and all(isinstance(part, DataLoader | TorchDataset) for part in data[:2]):  # type: ignore[index]
            second = data[1]  # type: ignore[index]
        untrained = [] if second is None else _some(known, second, rng, most)
        held = [_Drawn(image, label, None) for _, image, label in untrained]
        if data is None or (second is not None and len(held) >= wanted):
            return held, []
        return held, [_Drawn(image, label, (place, index)) for index, image, label in _some(known, data, rng, most)]


def _some(known: KnownImages, data: object, rng: torch.Generator, most: int) -> list[tuple[int, Tensor, int]]:
    with own_streams_put_back(data):
        drawn = islice(_indexed_at_random(data, set(), rng), most)
        return [(index, known.plain(image), label) for index, (image, label) in drawn]


def at_random(data: Any, taken: set[int], rng: torch.Generator) -> Iterator[tuple[Tensor, int]]:
    """Yield (image, label) of ``data``, or its training split, in random order if possible; skip indices ``taken``."""
    return (sample for _, sample in _indexed_at_random(data, taken, rng))


def _indexed_at_random(data: Any, taken: set[int], rng: torch.Generator) -> Iterator[tuple[int, tuple[Tensor, int]]]:
    data = first_data_set(data.train if isinstance(data, Dataset) else data)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) and not isinstance(data, Examples):
        yield from ((k, sample) for k, sample in enumerate(samples(data)) if k not in taken)
        return
    for index in torch.randperm(len(data), generator=rng).tolist():
        if index in taken:
            continue
        if isinstance(data, Examples):
            yield index, (data.images[index].float() / 255, int(data.labels[index]))
        else:
            yield index, as_sample(data[index])
