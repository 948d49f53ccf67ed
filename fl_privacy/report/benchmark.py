"""Rank defenses by leakage at a given loss of accuracy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from fl_privacy.measure.registry import IMAGE_METRIC
from fl_privacy.runs.config.study import Track
from fl_privacy.runs.folder.defense_choice import ROUNDING
from fl_privacy.runs.folder.leakage import WORST, Extent, main_of
from fl_privacy.runs.folder.study import StudyRow, Threat, threats_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Board:
    """Defenses, each at its strength that leaks least to the worst attacker.

    Attributes:
        accuracy_loss: most percentage points that a strength may cost.
        ranked: least leakage first, including the undefended one.
        beyond: families without a measured strength within that loss, each at the cheapest.
    """

    threat: Threat
    accuracy_loss: float
    ranked: Sequence[StudyRow]
    beyond: Sequence[StudyRow]

    @property
    def defended(self) -> list[StudyRow]:
        return [standing for standing in self.ranked if not standing.entry.undefended]

    @property
    def best(self) -> StudyRow | None:
        return next(iter(self.defended), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredBenchmark:
    """A benchmark, as far as it is done.

    Attributes:
        standings: all strengths, the undefended one first.
        code: SHA-256 of the sources that measured them, ideally one.
        data: SHA-256 of each data set, by name.
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
        return threats_of(self.track.cells)

    @property
    def worst_threat(self) -> Threat:
        return self.threats[-1]

    @property
    def metric(self) -> str:
        found = (r for s in self.standings for readings in s.readings.values() for r in readings)
        return main_of(list(found)) or IMAGE_METRIC

    @property
    def boards(self) -> list[Board]:
        asked = product(self.threats, self.track.accuracy_loss)
        return [_board(self.standings, threat, loss) for threat, loss in asked]

    @property
    def victims(self) -> str:
        numbers = {
            s.groups for found in self.standings[0].readings.values() for r in found if (s := r.statistic(r.main))
        }
        least, most = min(numbers, default=0), max(numbers, default=0)
        return str(least) if least == most else f"{least} to {most}"


def extent_of(row: StudyRow, threat: Threat) -> Extent:
    """Return the leakage by attackers up to ``threat``; the worst if not known."""
    candidate = row.candidate(threat)
    return WORST if candidate is None or row.missing(threat) else candidate.extent


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
