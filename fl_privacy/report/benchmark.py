"""Which defense leaks least at what loss, by a benchmark: boards over its rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.runs.config.study import Track
from fl_privacy.runs.folder.defense_choice import ROUNDING, extent_or_worst
from fl_privacy.runs.folder.leakage import Extent, main_of
from fl_privacy.runs.folder.study import StudyRow, Threat, threats_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Board:
    """Defenses in the order of what the worst attacker reads, each at its strength that leaks least.

    Attributes:
        threat: up to which attackers count.
        accuracy_loss: points that a strength may cost.
        ranked: least leakage first, the undefended one among them.
        beyond: families none of whose strengths is within that loss, or was measured, each at the cheapest.
    """

    threat: Threat
    accuracy_loss: float
    ranked: Sequence[StudyRow]
    beyond: Sequence[StudyRow]

    @property
    def defended(self) -> list[StudyRow]:
        """Return the ranked standings that have a defense."""
        return [standing for standing in self.ranked if not standing.entry.undefended]

    @property
    def best(self) -> StudyRow | None:
        """Return the defense that leaks least; ``None`` where none was measured."""
        return next(iter(self.defended), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """A benchmark, as far as it went.

    Attributes:
        track: what was asked for.
        standings: of all strengths, the undefended one first.
        code: SHA-256 of the sources that measured them, one if all is well.
        data: SHA-256 of each data set, by name.
        seconds: of work, over all jobs.
        jobs: how many there are.
        jobs_done: how many of them finished.
        hardware: in words.
    """

    track: Track
    standings: Sequence[StudyRow]
    code: Sequence[str]
    data: Mapping[str, str]
    seconds: float
    jobs: int
    jobs_done: int
    hardware: str

    @property
    def threats(self) -> tuple[Threat, ...]:
        """Return the attackers that the track has; without malicious servers where no cell has one."""
        return threats_of(self.track.cells)

    @property
    def worst_threat(self) -> Threat:
        """Return the most powerful kind of attacker, which includes all others."""
        return self.threats[-1]

    @property
    def metric(self) -> str:
        """Return the metric that examples of its kind are compared by; that of images where nothing is known."""
        found = (r for s in self.standings for readings in s.readings.values() for r in readings)
        return main_of(list(found)) or IMAGE_METRIC

    @property
    def boards(self) -> list[Board]:
        """Return a board for each threat and each loss of accuracy."""
        asked = product(self.threats, self.track.accuracy_loss)
        return [_board(self.standings, threat, loss) for threat, loss in asked]

    @property
    def victims(self) -> str:
        """Say how many victims there are in a cell."""
        numbers = {
            s.groups for found in self.standings[0].readings.values() for r in found if (s := r.statistic(r.main))
        }
        least, most = min(numbers, default=0), max(numbers, default=0)
        return str(least) if least == most else f"{least} to {most}"


def extent_of(row: StudyRow, threat: Threat) -> Extent:
    """Return how much attackers up to ``threat`` reconstructed; what is unknown counts as the worst."""
    return extent_or_worst(row.candidate(threat), complete=not row.missing(threat))


def _board(standings: Sequence[StudyRow], threat: Threat, loss: float) -> Board:
    families: dict[str, list[StudyRow]] = {}
    for standing in standings:
        families.setdefault(standing.entry.family, []).append(standing)
    ranked, beyond = [], []
    for strengths in families.values():
        within = [s for s in strengths if s.loss is not None and s.loss <= loss + ROUNDING and s.candidate(threat)]
        if within:
            ranked.append(min(within, key=lambda s: extent_of(s, threat)))
        else:
            beyond.append(min(strengths, key=lambda s: math.inf if s.loss is None else s.loss))
    return Board(
        threat=threat, accuracy_loss=loss, ranked=sorted(ranked, key=lambda s: extent_of(s, threat)), beyond=beyond
    )
