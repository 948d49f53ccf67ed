"""Results of a study: each defense at each strength, its trainings, and the leakage by every attack on it."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from fl_privacy.measure import Statistic, pmm
from fl_privacy.measure.roc import Finding
from fl_privacy.runs.config.study import UNDEFENDED, AttackCell, GridPoint
from fl_privacy.runs.folder.defense_choice import Candidate, candidate_of, least_over_control
from fl_privacy.runs.folder.ongoing import is_finished
from fl_privacy.runs.folder.read import Run, read_run, read_summary
from fl_privacy.runs.folder.summary import LeakageResult, Summary
from fl_privacy.types.victim_ids import Attacker

Threat = Literal["honest", "adaptive", "malicious"]
"""Attackers that count: those that do not know the defense, also those that know it, or also malicious
servers."""

THREATS: tuple[Threat, ...] = get_args(Threat)


@dataclass(frozen=True)
class Versus:
    """An attack and its attacker; ``worst`` is the one that leaks most."""

    attack: str
    attacker: Attacker | Literal["worst"]


@dataclass(frozen=True, kw_only=True)
class StudyEntry(GridPoint):
    """Result folders of a defense at one strength; unfinished jobs have none."""

    own: bool = False  # ``True`` if the user entered it
    trainings: Mapping[str, Path]  # folder of each training by name, the main one first
    attacks: Mapping[AttackCell, Path]
    problems: Mapping[str, str] = field(default_factory=dict)  # folder name of a failed job -> reason

    @property
    def name(self) -> str:
        return f"{self.family} ({self.strength})" if self.strength else self.family

    @property
    def undefended(self) -> bool:
        return self.family == UNDEFENDED

    @property
    def training(self) -> Path:
        return next(iter(self.trainings.values()))


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyRow:
    """Results of a defense at one strength."""

    entry: StudyEntry
    trainings: Mapping[str, Summary]
    undefended: Mapping[str, float]  # accuracy of the same trainings without a defense, in [0, 1]
    readings: Mapping[AttackCell, tuple[LeakageResult, ...]]  # leakage in each finished cell, round by round
    attacks: Mapping[AttackCell, Run] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def training(self) -> Summary | None:
        return self.trainings.get(next(iter(self.entry.trainings)))

    @property
    def trained(self) -> bool:
        return len(self.trainings) == len(self.entry.trainings)

    @property
    def complete(self) -> bool:
        return self.trained and all(self.readings.get(cell) for cell in self.entry.attacks)

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy of the main training, in [0, 1]."""
        return self.training.final_accuracy if self.training else None

    @property
    def pmm(self) -> float | None:
        """Return the accuracy in percent of the undefended one; ``None`` if either training did not finish."""
        undefended = self.undefended.get(next(iter(self.entry.trainings)))
        return pmm(self.accuracy, undefended) if self.accuracy is not None and undefended else None

    @property
    def losses(self) -> dict[str, float]:
        """Return the percentage points of accuracy lost, by training."""
        found = {name: s.final_accuracy for name, s in self.trainings.items() if name in self.undefended}
        return {name: 100 * (self.undefended[name] - a) for name, a in found.items() if a is not None}

    @property
    def loss(self) -> float | None:
        """Return the largest loss of a training; ``None`` unless all finished."""
        return max(self.losses.values()) if len(self.losses) == len(self.entry.trainings) else None

    @property
    def seconds(self) -> float:
        """Return the largest defense time of a training, in seconds per client and round."""
        return self._most("defense_seconds")

    @property
    def upload_bytes(self) -> float:
        return self._most("upload_bytes")

    @property
    def epsilon(self) -> float | None:
        spent = [s.privacy.epsilon if s.privacy else None for s in self.trainings.values()]
        known = [epsilon for epsilon in spent if epsilon is not None]
        return max(known) if known and len(known) == len(spent) else None

    @property
    def delta(self) -> float | None:
        """Return the largest delta of a training; ``None`` if nothing was trained."""
        return max((s.privacy.delta for s in self.trainings.values() if s.privacy), default=None)

    @property
    def upload(self) -> Mapping[str, Statistic]:
        return self.training.upload if self.training else {}

    @property
    def update_distortion(self) -> Mapping[str, Statistic]:
        return next((own for run in self.attacks.values() if (own := run.summary.update_distortion)), {})

    @property
    def findings(self) -> list[Finding]:
        summaries = [*self.trainings.values(), *(run.summary for run in self.attacks.values())]
        return [finding for summary in summaries for finding in summary.inferred]

    @property
    def all_readings(self) -> list[LeakageResult]:
        return [reading for found in self.readings.values() for reading in found]

    @cached_property
    def leakage(self) -> Mapping[Versus, LeakageResult]:
        return {
            Versus(cell.title, attacker): own[-1]
            for cell, found in self.readings.items()
            for attacker in Attacker
            if (own := [reading for reading in found if reading.attacker == attacker])
        }

    def statistic(self, versus: Versus, metric: str) -> Statistic | None:
        leakage = self.leakage.get(versus)
        return leakage.metrics.get(metric) if leakage else None

    def heard(self, threat: Threat, uploads: str | None = None) -> list[LeakageResult]:
        return [
            reading
            for cell, found in self.readings.items()
            for reading in found
            if uploads in (None, cell.uploads)
            and (threat == "malicious" or not cell.server)
            and (threat in ("malicious", "adaptive") or reading.attacker is Attacker.PLAIN)
        ]

    def knows_defense(self, cell: AttackCell) -> bool:
        """Return ``True`` if an attacker of ``cell`` knew the defense, or there was no ``defense=`` to know."""
        defends = any(o.startswith("defense=") and o != "defense=none" for o in self.entry.overrides)
        known = any(reading.attacker is Attacker.ADAPTIVE for reading in self.readings.get(cell, ()))
        return known or self.entry.undefended or not defends

    def candidate(
        self, threat: Threat = "malicious", uploads: str | None = None, *, asked: Collection[str] = ()
    ) -> Candidate | None:
        """Return the worst result of attackers up to ``threat``, on these ``uploads`` or all; ``None`` without any."""
        candidate = candidate_of(
            self.heard(threat, uploads),
            name=self.name,
            accuracy=self.accuracy if self.trained else None,
            pmm=self.pmm,
            findings=self.findings,
            asked=asked,
            undefended=self.entry.undefended,
        )
        if candidate is None:
            return None
        passive = self.heard("honest" if threat == "honest" else "adaptive", uploads)
        return replace(candidate, over_control=least_over_control(passive))

    def missing(self, threat: Threat) -> list[AttackCell]:
        """List the unknown cells: no attack finished, or none knew the defense if ``threat`` includes such attackers.

        An honest server's attack counts unless it failed on some victim; a malicious server's always.
        """

        def known(cell: AttackCell) -> bool:
            found = self.readings.get(cell, ())
            read = any(cell.server or (r.statistic(r.main) and not r.failures) for r in found)
            asked = threat == "malicious" or not cell.server
            return (read or not asked) and (threat == "honest" or bool(cell.server) or self.knows_defense(cell))

        return [cell for cell in self.entry.attacks if not known(cell)]

    def of_training(self, name: str, uploads: Collection[str]) -> "StudyRow":
        def own(cells: Mapping[AttackCell, Any]) -> dict[AttackCell, Any]:
            return {cell: value for cell, value in cells.items() if cell.uploads in uploads}

        entry = replace(self.entry, trainings={name: self.entry.trainings[name]}, attacks=own(self.entry.attacks))
        trained = {training: summary for training, summary in self.trainings.items() if training == name}
        return replace(self, entry=entry, trainings=trained, readings=own(self.readings), attacks=own(self.attacks))

    def _most(self, figure: str) -> float:
        return max((s.upload[figure].mean for s in self.trainings.values() if figure in s.upload), default=math.nan)


def threats_of(cells: Iterable[AttackCell]) -> tuple[Threat, ...]:
    """Return the attackers in ``cells``, the most powerful last."""
    tried = any(cell.server for cell in cells)
    return tuple(threat for threat in THREATS if tried or threat != "malicious")


def read_study(entries: Sequence[StudyEntry]) -> list[StudyRow]:
    """Return a row for each of ``entries``, without unfinished jobs."""
    trained = [
        {name: s for name, path in entry.trainings.items() if (s := read_summary(path)) is not None}
        for entry in entries
    ]
    undefended: dict[str, float] = {}
    for entry, found in zip(entries, trained, strict=True):
        for name, summary in found.items():
            if entry.undefended and summary.final_accuracy is not None:
                undefended.setdefault(name, summary.final_accuracy)
    attacks = [{cell: read_run(path) for cell, path in entry.attacks.items() if is_finished(path)} for entry in entries]
    return [
        StudyRow(
            entry=entry,
            trainings=trainings,
            undefended=undefended,
            readings={
                cell: tuple(replace(read, attack=cell.title) for read in run.summary.attacked)
                for cell, run in found.items()
            },
            attacks=found,
        )
        for entry, trainings, found in zip(entries, trained, attacks, strict=True)
    ]
