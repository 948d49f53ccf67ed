"""Interface of attacks, and time limits of their searches: ``with within(5.0)`` limits loops over :func:`timely`."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from fl_privacy.models.pretrained.generator import Provenance
from fl_privacy.progress import Progress, counted, no_progress
from fl_privacy.types import Observation, Reconstruction

Report = Callable[[float], None]  # takes the share, in [0, 1], of a group's work that is done


def part_of(report: Report, begin: float, end: float) -> Report:
    """Return a callback (share done) for the part of the work that moves progress from ``begin`` to ``end``."""
    return lambda share: report(begin + (end - begin) * share)


def part_of_work(progress: Progress, begin: float, end: float) -> Progress:
    """Return a callback (done, total) for the part of the work that moves progress from share ``begin`` to ``end``."""
    return lambda done, total: progress(round(1000 * (begin + (end - begin) * done / max(total, 1))), 1000)


class ReconstructionAttack(Protocol):
    """Attack that reconstructs the batch of each observed update (victim); results have the order of the observations.

    A victim's random numbers come from ``derive_generator(seed, "attack", observation.id, ...)``, so that adding a
    victim changes no other result. If a victim can't be attacked, its reconstruction states the reason in ``failure``.
    """

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]: ...


@runtime_checkable
class Trained(Protocol):
    """Attack with a component that was trained on images, such as a generator."""

    def provenance(self, image: Sequence[int]) -> Provenance | None: ...


def trained_on(attack: ReconstructionAttack, image: Sequence[int]) -> Provenance | None:
    """Describe the training data of the component that ``attack`` uses for images of shape ``image`` (C, H, W).

    ``None`` if it has no trained component. ``UserError`` if the component does not support such images.
    """
    return attack.provenance(image) if isinstance(attack, Trained) else None


T = TypeVar("T")


@dataclass(eq=False)
class Limit:
    """Time limit of a piece of work, inside the outer limit ``around`` it, if any."""

    end: float = math.inf  # on the clock of ``time.perf_counter``
    around: "Limit | None" = None
    cut: bool = False  # ``True`` once the limit has stopped a search


_limit: ContextVar[Limit | None] = ContextVar("limit", default=None)


@contextmanager
def within(seconds: float) -> Iterator[Limit]:
    """Limit the work in the context to ``seconds``, or to a shorter outer limit."""
    around = _limit.get()
    limit = Limit(time.perf_counter() + min(seconds, seconds_left()), around)
    before = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(before)


def even_share(among: int) -> AbstractContextManager[Limit]:
    """Limit the next piece of work to the time left divided by ``among``, the number of pieces still to do."""
    return within(seconds_left() / among)


def in_parts(
    victims: Mapping[int, Observation],
    size: int,
    name: str,
    report: Report,
    attack: Callable[[dict[int, Observation], Report], Mapping[int, Reconstruction]],
) -> dict[int, Reconstruction]:
    """Attack ``size`` victims at a time, each part with an even share of the time left; return results by key.

    ``name``: attack's name in progress messages. ``report``: callback for the share of work done. ``attack``: function
    of a part of ``victims`` and of its own callback.
    """
    items, results = list(victims.items()), dict[int, Reconstruction]()
    for begin in counted(name, range(0, len(items), size)):
        part = dict(items[begin : begin + size])
        with even_share(math.ceil((len(items) - begin) / size)):
            results |= attack(part, part_of(report, begin / len(items), (begin + len(part)) / len(items)))
    return results


def seconds_left() -> float:
    """Return the seconds until the time limit of the context; infinite if it has no limit."""
    limit = _limit.get()
    return math.inf if limit is None or limit.end == math.inf else max(0.0, limit.end - time.perf_counter())


def timely(items: Iterable[T]) -> Iterator[T]:
    """Yield ``items`` until the time limit set by :func:`within`, but at least the first."""
    for number, item in enumerate(items):
        if number and not seconds_left():
            limit = _limit.get()
            while limit is not None:
                limit.cut, limit = True, limit.around
            return
        yield item
