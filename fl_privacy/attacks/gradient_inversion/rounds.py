"""Updates of several rounds that come from the same examples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fl_privacy.types import Observation


@dataclass(frozen=True, eq=False)
class Victim:
    """What one reconstruction is made of.

    Attributes:
        position: of ``observation`` in the caller's sequence.
        observation: the last update.
        earlier: those before it from the same examples.
        positions: of all of them.
    """

    position: int
    observation: Observation
    earlier: tuple[Observation, ...] = ()
    positions: tuple[int, ...] = ()


def victims_of(observations: Iterable[tuple[int, Observation]]) -> list[Victim]:
    """One victim for each observation, but a common one for those that are known to come from the same examples.

    Only attackers that know the defense join rounds; that is what an adaptive attacker is measured by.
    """
    together: dict[object, list[tuple[int, Observation]]] = {}
    for position, observation in observations:
        known = observation.knowledge
        joins = known.same_data is not None and known.defense is not None
        shape = (observation.upload.num_examples, observation.input_shape, observation.num_classes)
        name = (known.same_data, *shape) if joins else position
        together.setdefault(name, []).append((position, observation))
    return [_victim(rounds) for rounds in together.values()]


def _victim(rounds: Sequence[tuple[int, Observation]]) -> Victim:
    positions, observations = zip(*rounds, strict=True)
    return Victim(positions[-1], observations[-1], observations[:-1], positions)
