"""What a benchmark showed: each defense at each strength under every attacker, and which leaks least at what loss."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from fl_privacy.config.study import AttackCell, Track
from fl_privacy.metrics.registry import IMAGE_METRIC
from fl_privacy.report.advice import THREATS, MeasuredDefense, Threat
from fl_privacy.results import Attacker, Candidate, Reading, Summary, read_summary
from fl_privacy.results.candidates import ROUNDING, candidate_of, extent_or_worst
from fl_privacy.results.readings import Extent, main_of, readings_of

NO_DEFENSE = ("defense=none",)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Folders with the results of a defense at one strength; jobs that did not finish have none.

    Attributes:
        family: of the defense.
        strength: in words.
        overrides: that ask for it.
        own: whether the user entered it.
        trainings: folder of each training by its name.
        attacks: folder of each attack by its cell.
        problems: why a job failed, by its folder's name.
    """

    family: str
    strength: str
    overrides: tuple[str, ...]
    own: bool
    trainings: Mapping[str, Path]
    attacks: Mapping[AttackCell, Path]
    problems: Mapping[str, str]

    @property
    def name(self) -> str:
        """Return the family and the strength."""
        return f"{self.family} ({self.strength})" if self.strength else self.family

    @property
    def undefended(self) -> bool:
        """Say whether this is the undefended setting."""
        return self.overrides == NO_DEFENSE


@dataclass(frozen=True, kw_only=True, eq=False)
class DefenseStanding:
    """Results of a defense at one strength.

    Attributes:
        tried: what was done.
        trainings: summaries of the trainings that finished, by name.
        undefended: accuracy of the same trainings without a defense, in [0, 1].
        readings: what was read in each cell whose attack finished.
    """

    tried: Tried
    trainings: Mapping[str, Summary]
    undefended: Mapping[str, float]
    readings: Mapping[AttackCell, tuple[Reading, ...]]

    @property
    def losses(self) -> dict[str, float]:
        """Return the points of accuracy lost, by training."""
        found = {name: s.final_accuracy for name, s in self.trainings.items() if name in self.undefended}
        return {name: 100 * (self.undefended[name] - a) for name, a in found.items() if a is not None}

    @property
    def loss(self) -> float | None:
        """Return the loss in the training that lost most; ``None`` unless all finished."""
        return max(self.losses.values()) if len(self.losses) == len(self.tried.trainings) else None

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy in the first training, in [0, 1]."""
        first = self.trainings.get(next(iter(self.tried.trainings)))
        return first.final_accuracy if first else None

    @property
    def seconds(self) -> float:
        """Return the seconds that the defense takes one client a round, in the training in which that is most."""
        return self._most("defense_seconds")

    @property
    def upload_bytes(self) -> float:
        """Return the bytes of one client's update, in the training in which they are most."""
        return self._most("upload_bytes")

    @property
    def epsilon(self) -> float | None:
        """Return the epsilon spent in the training that spent most; ``None`` where one gives no guarantee."""
        spent = [s.privacy.epsilon if s.privacy else None for s in self.trainings.values()]
        known = [epsilon for epsilon in spent if epsilon is not None]
        return max(known) if known and len(known) == len(spent) else None

    @property
    def delta(self) -> float | None:
        """Return the delta of epsilon: the largest of any training; ``None`` where nothing was trained."""
        return max((s.privacy.delta for s in self.trainings.values() if s.privacy), default=None)

    def heard(self, threat: Threat, uploads: str | None = None) -> list[Reading]:
        """List what attackers up to ``threat`` reconstructed, from all ``uploads`` or from those of one name."""
        return [
            reading
            for cell, found in self.readings.items()
            for reading in found
            if _counts(cell, reading, threat) and uploads in (None, cell.uploads)
        ]

    def candidate(self, threat: Threat, uploads: str | None = None) -> Candidate | None:
        """Return the worst result of attackers up to ``threat``; ``None`` without any, or if a training is missing."""
        accuracy = None if self.loss is None else self.accuracy
        return candidate_of(self.heard(threat, uploads), name=self.tried.name, accuracy=accuracy, pmm=None)

    def missing(self, threat: Threat) -> list[AttackCell]:
        """List the cells that are not known: no attack finished, or none knew of the defense.

        An attack by an honest server counts unless it failed on some victim; one that knows the defense has to where
        such attackers count. A malicious server that failed on all of them found none of the images that it looked for.
        """
        return [
            cell
            for cell in self.tried.attacks
            if (
                (threat == "malicious" or not cell.server)
                and not any(
                    cell.server or (r.statistic(r.main) and not r.leakage.failures) for r in self.readings.get(cell, ())
                )
            )
            or not (threat == "honest" or cell.server or self._who_knows_was_heard(cell))
        ]

    def _who_knows_was_heard(self, cell: AttackCell) -> bool:
        readings = self.readings.get(cell, ())
        return self.tried.undefended or any(r.attacker is Attacker.ADAPTIVE for r in readings)

    def of_training(self, name: str, uploads: Collection[str]) -> "DefenseStanding":
        """Return the results of one training alone.

        Args:
            name: of the training.
            uploads: that clients trained so send.
        """
        tried = replace(
            self.tried,
            trainings={name: self.tried.trainings[name]},
            attacks={cell: path for cell, path in self.tried.attacks.items() if cell.uploads in uploads},
        )
        return replace(
            self,
            tried=tried,
            trainings={own: summary for own, summary in self.trainings.items() if own == name},
            readings={cell: read for cell, read in self.readings.items() if cell.uploads in uploads},
        )

    def extent(self, threat: Threat) -> Extent:
        """Return how much attackers up to ``threat`` reconstructed; what is unknown counts as the worst."""
        return extent_or_worst(self.candidate(threat), complete=not self.missing(threat))

    def _most(self, figure: str) -> float:
        return max((s.upload[figure].mean for s in self.trainings.values() if figure in s.upload), default=math.nan)


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
    ranked: Sequence[DefenseStanding]
    beyond: Sequence[DefenseStanding]

    @property
    def defended(self) -> list[DefenseStanding]:
        """Return the ranked standings that have a defense."""
        return [standing for standing in self.ranked if not standing.tried.undefended]

    @property
    def best(self) -> DefenseStanding | None:
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
    standings: Sequence[DefenseStanding]
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


def threats_of(cells: Iterable[AttackCell]) -> tuple[Threat, ...]:
    """Return the attackers that ``cells`` have, those that can do more last; malicious servers only where one is."""
    tried = any(cell.server for cell in cells)
    return tuple(threat for threat in THREATS if tried or threat != "malicious")


def read_standings(tried: Sequence[Tried]) -> list[DefenseStanding]:
    """Return a standing for each of ``tried``, the undefended one first."""
    found = [
        {name: s for name, path in one.trainings.items() if (s := read_summary(path)) is not None} for one in tried
    ]
    undefended = {name: s.final_accuracy for name, s in found[0].items() if s.final_accuracy is not None}
    return [
        DefenseStanding(tried=one, trainings=trainings, undefended=undefended, readings=_read(one))
        for one, trainings in zip(tried, found, strict=True)
    ]


def measured_of(standing: DefenseStanding) -> MeasuredDefense | None:
    """Return the row for ``fl-privacy advise``, of one training; ``None`` unless all of it finished."""
    accuracy = standing.accuracy
    if standing.loss is None or accuracy is None or standing.missing("malicious"):
        return None
    candidates = {threat: standing.candidate(threat) for threat in threats_of(standing.tried.attacks)}
    return MeasuredDefense(
        name=standing.tried.name,
        overrides=standing.tried.overrides,
        accuracy=accuracy,
        by_threat={threat: found for threat, found in candidates.items() if found},
        seconds=standing.seconds,
        upload_bytes=standing.upload_bytes,
        epsilon=standing.epsilon,
        delta=standing.delta,
    )


def _board(standings: Sequence[DefenseStanding], threat: Threat, loss: float) -> Board:
    families: dict[str, list[DefenseStanding]] = {}
    for standing in standings:
        families.setdefault(standing.tried.family, []).append(standing)
    ranked, beyond = [], []
    for strengths in families.values():
        within = [s for s in strengths if s.loss is not None and s.loss <= loss + ROUNDING and s.candidate(threat)]
        if within:
            ranked.append(min(within, key=lambda s: s.extent(threat)))
        else:
            beyond.append(min(strengths, key=lambda s: math.inf if s.loss is None else s.loss))
    return Board(
        threat=threat, accuracy_loss=loss, ranked=sorted(ranked, key=lambda s: s.extent(threat)), beyond=beyond
    )


def _counts(cell: AttackCell, reading: Reading, threat: Threat) -> bool:
    if threat == "malicious":
        return True
    return not cell.server and (threat == "adaptive" or reading.attacker is Attacker.PLAIN)


def _read(tried: Tried) -> dict[AttackCell, tuple[Reading, ...]]:
    summaries = {cell: found for cell, path in tried.attacks.items() if (found := read_summary(path)) is not None}
    return {
        cell: tuple(readings_of(found, cell.title, undefended=tried.undefended)) for cell, found in summaries.items()
    }
