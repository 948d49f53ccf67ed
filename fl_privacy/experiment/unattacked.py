"""Images of an app's own data that nobody attacks: what attacked ones are told apart from.

Images of another kind would not do: what all pictures of a class have in common leads cuts of photographs by far, so
that the mean of a class would be called read.
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fl_privacy.data import Dataset, Examples
from fl_privacy.data.app_data import as_sample, own_streams_put_back, samples
from fl_privacy.experiment.app_truth import KnownImages
from fl_privacy.experiment.candidates import MOST, at_most, shipped_others
from fl_privacy.federation import Failure
from fl_privacy.federation.replies import attempt
from fl_privacy.metrics.controls import Others
from fl_privacy.metrics.outcome import LEAST_CANDIDATES
from fl_privacy.metrics.public_images import PublicImages
from fl_privacy.rng import derive_generator, streams_put_back
from fl_privacy.types import Batch, VictimId

logger = logging.getLogger(__name__)

NO_CLASS = -1
"""Of images that packages ship."""

Samples = list[tuple[Tensor, int]]


def others_of_app(
    data: KnownImages,
    attacked: Sequence[VictimId],
    truth: KnownImages,
    shape: tuple[int, ...],
    number: int = MOST,
    *,
    seed: int,
) -> Others:
    """Take images that attacked ones are compared with: of the same data, or where there are few, shipped ones.

    Args:
        data: of the app; of a (train, test) pair or a data set of this package the second half is taken first.
        attacked: victims, whose images are no candidates.
        truth: knows their images.
        shape: (C, H, W) of an image.
        number: of candidates; 0 takes none.
        seed: of the choice.
    """
    if len(shape) != 3 or not (number := at_most(number, shape)):
        return Others()
    found = attempt(lambda: _drawn(data, attacked, number, seed))
    if isinstance(found, Failure):
        logger.warning("No candidates from the app's data: %s", found.reason)
        found = []
    known = [batch for victim in attacked if (batch := truth.batch(victim)) is not None]
    alike = [(image, label) for image, label in found if tuple(image.shape) == shape]
    return others_among(alike, known, shape, number, seed=seed)


def others_among(
    images: Samples, attacked: Sequence[Batch], shape: tuple[int, ...], number: int = MOST, *, seed: int
) -> Others:
    """Take those of ``images`` that are none of the ``attacked``; where they are few, with shipped ones among them.

    Args:
        images: of the same data, (C, H, W) in [0, 1] with their classes.
        attacked: originals.
        shape: (C, H, W) of an image.
        number: of candidates, at most.
        seed: of the choice.
    """
    taken, labels = torch.empty(0, *shape), torch.empty(0, dtype=torch.long)
    if images:
        taken = torch.stack([image for image, _ in images]).float().clamp(0, 1)
        labels = torch.tensor([label for _, label in images])
        originals = [batch.inputs for batch in attacked if tuple(batch.inputs.shape[1:]) == shape]
        keep = ~PublicImages(images=taken).equal(torch.cat([*originals, torch.empty(0, *shape)]))
        taken, labels = taken[keep][:number], labels[keep][:number]
    if len(taken) >= min(LEAST_CANDIDATES, number):
        return Others(candidates=PublicImages(images=taken, labels=labels, name="other images of the same data"))
    shipped = shipped_others(shape, number - len(taken), seed=seed).candidates
    if shipped is None:
        return Others(candidates=PublicImages(images=taken, labels=labels, name="other images of the same data"))
    if not len(taken):
        return Others(candidates=shipped)
    none = torch.full((len(shipped.images),), NO_CLASS)
    every = torch.cat([taken, shipped.images]), torch.cat([labels, none])
    name = f"{len(taken)} other images of the same data and {shipped.name}"
    return Others(candidates=PublicImages(images=every[0], labels=every[1], name=name))


def _drawn(known: KnownImages, attacked: Sequence[VictimId], number: int, seed: int) -> Samples:
    """Draw at most ``number`` images from all known places, in [0, 1]: first those that no client trains on."""
    places: list[int | None] = [None]
    if known.of_client is not None:
        places = list(dict.fromkeys(known.partition(victim.client) for victim in attacked))
    held: Samples = []
    trained: Samples = []
    most = 1 + (number + len(attacked)) // len(places)
    for place in places:
        with streams_put_back():
            data = known.data if place is None or known.of_client is None else known.of_client(place)
            rng = derive_generator(seed, "candidates", place or 0)
            second = _second_half(data)
            if second is not None:
                held += _some(known, second, set(), rng, most)
            if data is not None and (second is None or len(held) < number):
                trained += _some(known, data, known.places_of(attacked, place), rng, most)
    return held + trained


def _some(known: KnownImages, data: object, taken: set[int], rng: torch.Generator, most: int) -> Samples:
    with own_streams_put_back(data):
        return [(known.plain(image), label) for image, label in islice(at_random(data, taken, rng), most)]


def _second_half(data: object) -> object | None:
    """Return the part of ``data`` that no client trains on; ``None`` where there is no such part."""
    if isinstance(data, Dataset):
        return data.test
    pair = isinstance(data, tuple | list) and len(data) > 1
    if pair and all(isinstance(part, DataLoader | TorchDataset) for part in data[:2]):  # type: ignore[index]
        return data[1]  # type: ignore[index]
    return None


def at_random(data: Any, taken: set[int], rng: torch.Generator) -> Iterator[tuple[Tensor, int]]:
    """Yield the examples of ``data`` at random, but not those at the places ``taken``; in order where only that works.

    Of a (train, test) pair or a data set of this package these are the first half's.
    """
    if isinstance(data, Dataset):
        data = data.train
    if isinstance(data, tuple | list) and data and isinstance(data[0], DataLoader | TorchDataset):
        data = data[0]
    data = data.dataset if isinstance(data, DataLoader) else data
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) and not isinstance(data, Examples):
        yield from (sample for k, sample in enumerate(samples(data)) if k not in taken)
        return
    for index in torch.randperm(len(data), generator=rng).tolist():
        if index in taken:
            continue
        if isinstance(data, Examples):
            yield data.images[index].float() / 255, int(data.labels[index])
        else:
            yield as_sample(data[index])
