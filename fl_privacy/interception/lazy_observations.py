"""Observations that are read one at a time, so that those of a long run need not fit into memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import overload

from fl_privacy.types import Observation, VictimId

Change = Callable[[Observation], Observation]


class LazyObservations(Sequence[Observation], ABC):
    """Observations of which each is read when it is asked for; a slice reads nothing.

    Attributes:
        ids: of all of them.
    """

    ids: Sequence[VictimId]

    @abstractmethod
    def load(self, place: int) -> Observation:
        """That at ``place``, from 0."""

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> Observation: ...

    @overload
    def __getitem__(self, place: slice) -> "LazyObservations": ...

    def __getitem__(self, place: int | slice) -> "Observation | LazyObservations":
        places = range(len(self))[place]
        return self.load(places) if isinstance(places, int) else _Some(self, places)


class _Some(LazyObservations):
    """Those of ``whole`` at ``places``, each as ``changed`` makes it."""

    def __init__(self, whole: Sequence[Observation], places: Sequence[int], changed: Change | None = None) -> None:
        self._whole, self._places, self._changed = whole, places, changed
        known = ids_of(whole)
        self.ids = [known[place] for place in places]

    def load(self, place: int) -> Observation:
        """See ``LazyObservations``."""
        found = self._whole[self._places[place]]
        return self._changed(found) if self._changed else found


def only(observations: Sequence[Observation], wanted: Callable[[VictimId], bool]) -> Sequence[Observation]:
    """Those whose name is ``wanted``; reads none."""
    return _Some(observations, [place for place, id in enumerate(ids_of(observations)) if wanted(id)])


def by_id(observations: Sequence[Observation]) -> Sequence[Observation]:
    """All in the order of their names; reads none."""
    ids = ids_of(observations)
    return _Some(observations, sorted(range(len(ids)), key=ids.__getitem__))


def changed(observations: Sequence[Observation], change: Change) -> Sequence[Observation]:
    """All, each changed when it is read."""
    return _Some(observations, range(len(observations)), change)


def ids_of(observations: Sequence[Observation]) -> Sequence[VictimId]:
    """Their names, where that can be without reading them."""
    return observations.ids if isinstance(observations, LazyObservations) else [o.id for o in observations]
