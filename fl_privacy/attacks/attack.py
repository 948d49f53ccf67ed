"""What an attack is: observations in, reconstructions out, and never the truth."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from fl_privacy.generator import Provenance
from fl_privacy.types import Observation, Reconstruction

Progress = Callable[[int, int], None]
"""(work done, work in all), in any unit; called often and cheap."""

Report = Callable[[float], None]
"""Takes the share of the work on a group of victims that is done, in [0, 1]."""


def no_progress(done: int, total: int) -> None:
    """Report to nobody."""


def part_of(report: Report, begin: float, end: float) -> Report:
    """What takes the share of a part of the work that lasts from ``begin`` to ``end``, in [0, 1], of the whole."""
    return lambda share: report(begin + (end - begin) * share)


class ReconstructionAttack(Protocol):
    """Guesses the batch behind each update.

    One call attacks all victims at once; the victim ``observation.id`` draws from its own random stream,
    ``derive_generator(seed, "attack", observation.id, ...)``, so that adding a victim changes no other result.
    A victim that can't be attacked gets a ``Reconstruction`` with ``failure`` set; the others go on.
    """

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """One reconstruction for each observation, in their order."""
        ...


@runtime_checkable
class Trained(Protocol):
    """An attack with a part that was trained on images."""

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        """What it was trained on, for images (C, H, W); ``None`` where it was not."""
        ...


def trained_on(attack: ReconstructionAttack, image: Sequence[int]) -> Provenance | None:
    """What a part of ``attack`` was trained on, for images (C, H, W); ``None`` where none was.

    Raises:
        UserError: there is no such part for these images.
    """
    return attack.provenance(image) if isinstance(attack, Trained) else None
