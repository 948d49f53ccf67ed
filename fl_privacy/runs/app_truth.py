"""Look up the images behind uploads of third-party clients."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_privacy.data import Dataset, Examples, app_data, load_data
from fl_privacy.errors import UserError
from fl_privacy.federation import Failure, Replay, attempt
from fl_privacy.files.foreign import expanded
from fl_privacy.rng import streams_put_back
from fl_privacy.types import Batch, Observation, VictimId
from fl_privacy.types.plan import Normalization

OfClient = Callable[[int], object]  # partition -> its client's training data
MOST_DRAWN = 20_000  # most examples redrawn to find a probe's image whose index is not known
Images = Iterator[tuple[Tensor, int]]
logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownImages:
    """Looks up the images behind uploads, by the fingerprints (hashes) or the data partitions that clients state."""

    data: object = None
    of_client: OfClient | None = None
    normalization: Normalization | None = None
    # fingerprints of each victim's images, in order
    fingerprints: Mapping[VictimId, Sequence[str]] = field(default_factory=dict)
    numbers: Mapping[VictimId, int] = field(default_factory=dict)  # stated number of examples of each victim
    given: Mapping[VictimId, Batch] = field(default_factory=dict)
    partitions: Mapping[int, int] = field(default_factory=dict)  # client -> its partition, if numbered differently
    _found: dict[str, tuple[Tensor, int]] = field(default_factory=dict, init=False, repr=False)
    _searched: set[int | None] = field(default_factory=set, init=False, repr=False)
    _drawn_at: dict[VictimId, int] = field(default_factory=dict, init=False, repr=False)

    def batch(self, victim: VictimId) -> Batch | None:
        """Return the examples behind the upload ``victim``; ``None`` if they are unknown, or loading the data fails."""
        if victim in self.given:
            return self.given[victim]
        found = attempt(lambda: self._batch(victim))
        if isinstance(found, Failure):
            logger.warning("The images behind %s could not be looked up: %s", victim, found.reason)
            return None
        return found

    def _batch(self, victim: VictimId) -> Batch | None:
        wanted = self.fingerprints.get(victim)
        if wanted is not None:
            self._search(wanted, victim.client)
            found = [self._found[one] for one in wanted if one in self._found]
            return _as_batch(found) if len(found) == len(wanted) else self._redrawn(wanted, victim)
        if victim.probe is not None or self.of_client is None:
            return None
        number = self.numbers.get(victim, 0)
        own = list(islice(self._images(victim.client), number + 1))
        return _as_batch(own) if len(own) == number else None

    def _redrawn(self, wanted: Sequence[str], victim: VictimId) -> Batch | None:
        if victim.probe is None or (self.data is None and self.of_client is None):
            return None
        with streams_put_back():
            known = self.of_client is not None
            data: Any = self.of_client(self.partition(victim.client)) if self.of_client else self.data
        data = app_data.first_data_set(data)
        if isinstance(data, Dataset | Examples) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            return None
        size, start = len(wanted), victim.probe * len(wanted)
        for first in [start] if known else range(0, min(len(data), MOST_DRAWN) - size + 1):
            with streams_put_back(app_data.probe_seed(victim.probe, size)), app_data.own_streams_put_back(data):
                drawn = [app_data.as_sample(data[k]) for k in range(first, min(first + size, len(data)))]
            images = [(self.plain(image), label) for image, label in drawn]
            if [app_data.fingerprint(image) for image, _ in images] == list(wanted):
                self._drawn_at[victim] = first
                return _as_batch(images)
        return None

    def partition(self, client: int) -> int:
        return self.partitions.get(client, client)

    def plain(self, image: Tensor) -> Tensor:
        return (image if self.normalization is None else self.normalization.undo(image)).clamp(0, 1)

    def places_of(self, victims: Iterable[VictimId], partition: int | None) -> set[int]:
        """Return the indices of the images behind ``victims``, in a client's ``partition`` or (``None``) all data."""
        found = set[int]()
        for victim in victims:
            if victim.probe is None or (partition is not None and self.partition(victim.client) != partition):
                continue
            size = len(self.fingerprints.get(victim, ())) or 1
            first = victim.probe * size if partition is not None else self._drawn_at.get(victim)
            if first is not None:
                found |= set(range(first, first + size))
        return found

    def first(self, number: int) -> list[Batch]:
        if self.data is None and self.of_client is None:
            return []
        return [_as_batch([image]) for image in islice(self._images(0), number)]

    def replay(self, observation: Observation) -> Replay:
        raise UserError(
            f"A replay expects a client of this package, but {observation.id} is of a third party; attack it alone."
        )

    def _images(self, client: int | None) -> Images:
        own = self.of_client is not None and client is not None
        data = self.of_client(self.partition(client)) if own else self.data  # type: ignore[arg-type, misc]
        for image, label in _examples(data):
            yield self.plain(image), label

    def _search(self, wanted: Sequence[str], client: int) -> None:
        place = client if self.of_client is not None else None
        if place in self._searched or all(one in self._found for one in wanted):
            return
        if self.data is None and self.of_client is None:
            return
        needed = {one for fingerprints in self.fingerprints.values() for one in fingerprints} - self._found.keys()
        for image, label in self._images(place):
            if (name := app_data.fingerprint(image)) in needed:
                self._found[name] = image, label
                needed.discard(name)
            if not needed:
                return
        self._searched.add(place)


@dataclass(frozen=True, kw_only=True)
class NamedImages:
    """Images that a user gave as ``data``, each of ``input_shape`` (C, H, W)."""

    name: str = "unknown"
    data: object = None
    of_client: OfClient | None = None
    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    normalization: Normalization | None = None


def find_images(data: object) -> NamedImages:
    """Open the images of ``data``; ``UserError`` if it holds none.

    ``data``: data set or its name, loader, list of examples, folder, function from partition to these, or ``None``.
    """
    if data is None:
        return NamedImages()
    if isinstance(data, str | Path):
        name, path = str(data), expanded(str(data))
        if not (path.exists() or path.is_absolute() or name.startswith(".")):
            return _looked_into(load_data(name), name=name)
        if path.is_file():
            raise UserError(f"data is expected to be a folder of images, but {name} is a file; name its folder.")
        return _looked_into(load_data("image_folder", root=str(path)), name=path.name)
    if isinstance(data, type):
        raise UserError(f"data is expected to be a data set, but got the class {data.__name__}; make one of it first.")
    if callable(data) and not hasattr(data, "__getitem__"):
        return _looked_into(data(0), of_client=data)
    return _looked_into(data)


def _looked_into(data: object, *, of_client: OfClient | None = None, name: str | None = None) -> NamedImages:
    with app_data.own_streams_put_back(data):
        first = list(islice(_examples(data), app_data.LOOKED_AT))
    if not first:
        raise UserError("data is expected to hold images, but is empty; give some.")
    classes = data.train.num_classes if isinstance(data, Dataset) else None
    classes = data.num_classes if isinstance(data, Examples) else classes
    normalization = None
    if not isinstance(data, Dataset | Examples):
        with app_data.own_streams_put_back(data):
            normalization = app_data.find_normalization(data)
    return NamedImages(
        name=name or (data.name if isinstance(data, Dataset) else "its own data"),
        data=None if of_client else data,
        of_client=of_client,
        input_shape=tuple(first[0][0].shape),
        num_classes=classes,
        normalization=normalization,
    )


def _examples(data: object) -> Images:
    if isinstance(data, Dataset):
        yield from _examples(data.train)
        yield from _examples(data.test)
    elif isinstance(data, Examples):
        for index in range(len(data)):
            yield data.images[index].float() / 255, int(data.labels[index])
    else:
        yield from app_data.samples(data)


def _as_batch(images: Sequence[tuple[Tensor, int]]) -> Batch:
    return Batch(torch.stack([image for image, _ in images]), torch.tensor([label for _, label in images]))
